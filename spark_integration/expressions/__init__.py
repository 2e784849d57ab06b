"""Columns and SQL text as expressions of Flux: resolved by Spark's analyser, computed in workers.

analysed   Operators of a DataFrame, analysed by Spark, as steps
nodes      Nodes of an analysed expression, read in one call, and the questions that need another
classes    The table of Spark's classes of expressions
"""
