"""The other processes of a query, without I/O: ingress tasks and readers of output.

ingress       The sending side of a Spark ingress task, without I/O: one partition of one source
output_pull   The questions of a reader of output, and their addressees
output_fetch  Fetching the collected output of one partition, wherever it is
"""
