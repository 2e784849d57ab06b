"""``flux bench kafka``: a running count per key, from a topic to a topic, in Flux and in its peers.

bench        The runs: latency, a killed executor, a backlog
count        The query: a running count per key, exactly once, in the executors
load         Paced rows into a topic, or a backlog as fast as possible
written      Contents of the topics after a run, read by another client (librdkafka), and the figures that follow from them
watch        Rows of a topic as a reader of committed records meets them, while they are written
peers        Spark's real-time mode, its micro-batches, and Kafka Streams
spark_count  A running count in Spark Structured Streaming, in a process with executors of its own
echo         The warm-up of a broker before anything is measured
cores        Cores that processes use during a measurement, and the end of a JVM's compilation
fastest      Highest rate at which at most one row in a hundred gets older than a bound, for each system by itself
doors        Listeners of one broker that a benchmark compares
"""
