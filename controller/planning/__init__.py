"""Plans: a user's flow, checked and frozen for all processes of a query.

compiler          A user's flow to a checked plan: names, schemas, keys, edges, topological order
inputs            Inputs of a stage, rows of a source or a stage behind steps; and its sink
names             Names of columns in a plan, and of stages and sources in errors about expressions
ranks             Ranks and duplicates: the operators of declarations
joins             Joins: both sides as Spark resolves them, and steps around the operator
lookups           Joins with tables: steps of an edge that look up rows
unions            Unions: inputs brought to the same columns
checks            Checks of whole plans: output that would never come, or that nothing takes
replica_kinds     Kinds of replicas in a plan, and the stages that may have replicas without an order
availability      Availability in a plan: the stages and sources that a bound reaches, and refusals
event_time_edges  Event time in a plan: which edges state watermarks, and whether windows ever close
columns           Columns at which something looks, from the last stage to the sources
explain           A plan as text for people
"""
