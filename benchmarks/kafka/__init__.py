"""``flux bench kafka``: a running count per key, from a topic to a topic, in Flux and in its peers.

bench        A running count per key from a topic to a topic
count        The query
load         Rows into a topic
written      Contents of the topics after a run, read by another client (librdkafka), and the figures that follow from them
peers        The peers of Flux
spark_count  A running count in Spark Structured Streaming, in a process with executors of its own
echo         Warm-up of a broker
cores        Cores that processes use during a measurement, and the end of a JVM's compilation
fastest      Highest rate at which at most one row in a hundred gets older than a bound, for each system by itself
doors        Listeners of one broker that a benchmark compares
"""
