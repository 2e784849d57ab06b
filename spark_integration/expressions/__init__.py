"""Columns and SQL text as expressions of Flux: resolved by Spark's analyser, computed in workers.

analysed_operators  Operators of a DataFrame, analysed by Spark, as steps
aggregates          Keys and aggregates, analysed by Spark, as an aggregate with steps around it
orders              Orders of rows in the language of ORDER BY, as columns
joins               Conditions of joins, analysed by Spark, as keys, bounds of event time and a rest
analyser_answers    Answers of the analyser about flows that are being written
intervals           Constant intervals that are added to times
windows             Windows among keys, recognised as calls before the analysis
nodes               Nodes of an analysed expression, read in one call, and the questions that need another
classes             The table of Spark's classes of expressions
"""
