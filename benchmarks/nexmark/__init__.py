"""``flux bench nexmark``: the 23 queries of Nexmark, each compared with an oracle, beside Structured Streaming, and among faults.

bench       The runs of the command: measured and compared, query by query
chaos       One query on real executors, among kills and a restart
held        Events that wait for the faults of a run
origins     Events from the generator, from files and from a topic
outputs     Outputs of queries, thrown away or kept
spark_peer  The queries that Structured Streaming can express
picture     Events a second by query
checkout    Queries, generator and oracle, which are not installed
"""
