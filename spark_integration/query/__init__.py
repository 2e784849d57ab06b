"""A query of Spark's driver: its start, its handle, its output and its end.

start                The start of a query from flows: everything is checked before anything runs
declarations         Declared flows on their way to a plan: session, compilation, checks of what travels
query                The handle of a running query, in the manner of pyspark's StreamingQuery
run                  One run of a query: it starts everything, watches it, and leaves nothing behind
lookup_tables        Tables in every worker: read when a query starts, and kept in its checkpoint location
source_setup         The preparation of sources and sinks, and input that has come since and is not read
running_queries      Active queries of this process, which have not ended
same_plan            The plan that a checkpoint location remembers, and differences that forbid a start
operations           Changes of a query while it runs, from its own program
output               The output of a query as a DataFrame, and as an iterator while the query runs
follow               A running query on the screen
checkpoint_location  The description of a query in its location, and the process that writes there
interrupts           Ctrl-C stops the call that it interrupts, and no query
"""
