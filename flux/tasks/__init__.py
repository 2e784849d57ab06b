"""The other processes of a query, without I/O: ingress tasks and readers of output.

micro_batches  The streams of one partition of a source whose rows come in micro-batches of Structured Streaming
ingress        The sending side of a Spark ingress task, without I/O: one partition of one source
output_pull    The questions of a reader of output, and their addressees
output_fetch   Fetching the collected output of one partition, wherever it is
"""
