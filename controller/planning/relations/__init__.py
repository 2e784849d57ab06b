"""Relations in a plan: the operators, keys and steps that declarations over rows of several inputs make.

ranks             Ranks and duplicates: the operators of declarations
joins             Joins: both sides as Spark resolves them, and steps around the operator
lookups           Joins with tables: steps of an edge that look up rows
unions            Unions: inputs brought to the same columns
"""
