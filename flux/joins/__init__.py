"""Joins: rows of two inputs with equal keys, which wait for each other in state (design: joins).

join_spec         The declaration of a join: kind, keys, bounds of event time, given columns
join              The operator: pairs, rows without a match, and the end of their wait
waiting_rows      Rows of one side that wait for matches
arena             Growing columns, from which rows are taken by their numbers
as_of             As-of joins: each left row with the newest right row at or before its time
held_back_rows    Rows of one input that wait for the watermark
join_text         A join as text for people
lookup            A small table in every worker, in which rows look up the row of their key
refreshed_lookup  The same in a table that is read anew while the query runs
"""
