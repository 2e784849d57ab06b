"""Benchmarks: rates, latencies and costs of faults, beside Spark's own streaming and others.

throughput      Keyed count and sum over parquet files, in Flux and in Spark Structured Streaming, side by side in one run
latency         Latency from ingress to egress at a steady rate
small           Small batches at a steady rate, which no source joins
failover        Faults, seen from outside
move            Moves of partitions, seen from outside, while rows flow
skew            Uneven load, with static placement and with load balance
techniques      Costs of each recovery technique without faults, and its gain when an executor is killed
restart         Time until a query goes on after driver, executors and workers were killed at once
restart_peer    The peer of ``benchmarks.restart``
schedule        The order of checkpoints
kafka_read      Rows a second from a topic into Arrow columns in one process, beside confluent-kafka's ``consume`` in the same
                run
kafka_write     Rows a second into a topic, and how long one small write takes, beside confluent-kafka's idempotent producer
                in the same run
kafka_avro      Values of Avro and JSON to columns and back, with the same rows
streams         Streams in and out of a query, one case at a time, on this machine
streams_out     The output of a query as a stream of Spark's, beside a Python data source that gives the same rows without
                Flux
stream_sources  Sources in the workers beside other ways to the same rows
scale           Costs that grow with the size of a cluster
scale_real      CPU per row of real workers on this machine
virtual         A cluster of any size on one thread
one_loss        The loss of one worker of a large cluster, seen by the controller
data            Rows for the side-by-side runs
paced           Rows that are due at a steady rate, made from their number alone, so that they can be made again and counted
arrivals        A sink that notes arriving rows and their times, and an evaluation of its notes at the end
operating       Requests of the benchmarks to a running query
timeline        The picture of a benchmark
figures         The picture of the figures in README.md
session         The Spark session of the benchmarks
machine         Speed of this machine and its Python at the moment
"""
