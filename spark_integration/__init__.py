"""Queries inside Spark: the only package that imports pyspark.

settings  ``spark.flux.*`` of a session, and the task slots of its cluster
jvm       Classes and static members of the JVM by name, each looked up once
session   Sessions beside the user's, with settings that suit bulk transfer
schema    Schemas as users give them (DDL, StructType, pyarrow, a DataFrame's own) and as the exchange needs them (pyarrow)
daemon    The process of an executor that forks Spark's Python workers, with Flux loaded before it forks
java      A check for a Java that Spark can use
"""
