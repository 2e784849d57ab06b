"""Operators, the user's code in a stage: their contract, their state, and the rows that they get and give.

operator         ``flux.Operator``: the contract between the exchange and the user's code
tentative        Tentative results, which an operator would give if missing input had come
attributes       State of operators that define neither ``snapshot`` nor ``restore``
aggregate        ``flux.Aggregate``: count, sum, min, max and mean per key, with Spark SQL's answers
keyed_operator   ``flux.KeyedOperator``: state per key in plain Python, with timers per key
windowed_groups  Groups of an aggregate by window: rows in, results out when the watermark has passed a window
windowed_rows    Functions over the rows of a group, called when its window is final
collect          The operator at the end of ``toDF()``, which keeps output until tasks have fetched it
schema           Columns found by name, and schemas read from Spark's DDL without Spark
batches          Batches of users and sources, checked against their schema and cut to size
plain_columns    Columns in the types in which they travel, without dictionaries and views
row_function     A function of the user's among conditions and columns: one row for each row
user_code        Errors of the user's code as text, without the frames of Flux, and facts about functions that users give
"""
