"""The controller: the owner of every partition, before and after faults and moves.

plan_compiler     A user's flow to a checked plan: names, schemas, keys, edges, topological order
plan_inputs       Inputs of a stage, rows of a source or a stage behind steps; and its sink
plan_names        Names of columns in a plan, and of stages and sources in errors about expressions
plan_ranks        Ranks and duplicates: the operators of declarations
plan_joins        Joins: both sides as Spark resolves them, and steps around the operator
plan_lookups      Joins with tables: steps of an edge that look up rows
plan_unions       Unions: inputs brought to the same columns
plan_checks       Checks of whole plans: output that would never come, or that nothing takes
event_time_edges  Event time in a plan: which edges state watermarks, and whether windows ever close
alignment         Alignment of sources: how far a reader may be ahead of the one that is farthest behind
server            The controller's thread: socket and clock around the state machine
explain           A plan as text for people
text              Counts and lists of numbers in sentences for people, the same everywhere
"""
