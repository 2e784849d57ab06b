"""Runs flows inside Spark: the only importer of pyspark."""
