"""Kernels: the functions of expressions on columns, each with Spark's answers.

values         Arrays and scalars as kernels take them, and errors of rows
calendar       Time zones, days, months and parts of times
decimals       Decimals: exact operators and rounding HALF_UP
strict_math    Powers, exponentials and logarithms, as Java's StrictMath has them
arithmetic     Numbers: operators and mathematical functions
logic          Comparison, membership, the greatest and the least
patterns       LIKE, RLIKE, extraction, replacement and splitting
strings        Text, by characters
formats        Times as text and back, by patterns of Java
text_casts     Casts from and to text
casts          Casts between numbers, dates and timestamps
times          Functions of dates, timestamps and intervals
nested_values  Fields of structs and elements of arrays
"""
