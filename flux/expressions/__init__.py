"""Scalar expressions on Arrow batches, with the answers of Spark's batch engine. Importable without Spark.

types       Spark's types as Arrow types, and their names
java_regex  Regular expressions of Java, translated
functions   The table of functions, each with its kernel
tree        Expressions: frozen nodes, their text form and their evaluation
steps       Conditions and columns between a source and a stage, as one step
sql         Expressions and steps as text of SQL, for people
"""
