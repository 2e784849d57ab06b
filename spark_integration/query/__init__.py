"""A query of Spark's driver: its start, its handle, its output and its end.

start                Start of a query from flows
query                The handle of a running query, in the manner of pyspark's StreamingQuery
run                  One run of a query
source_setup         Input that sources have got since the query was started, and do not read
running_queries      Active queries of this process, which have not ended
same_plan            The plan of a query as a checkpoint location remembers it, and the difference that forbids another plan
                     to go on from it
operations           Changes of a query while it runs, from its own program
output               The output of a running query as an iterator in the program that started it
follow               A running query on the screen
checkpoint_location  The driver's side of a checkpoint location
interrupts           Ctrl-C in a program with running queries
"""
