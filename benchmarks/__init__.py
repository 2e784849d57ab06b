"""Benchmarks: rates, latencies and costs of faults, beside Spark's own streaming and others.

throughput      Keyed count and sum over parquet files, in Flux and in Spark Structured Streaming, side by side in one run
latency         Latency from ingress to egress at a steady rate
event_time      Windows, sessions, joins and state per key over parquet files, beside Structured Streaming
result_age      Age of a window's result at a sink
join_age        Age of a joined row at a sink
availability    Results while a source partition is silent, and their corrections
healthy         Throughput of healthy streams while another one is silent
small           Small batches at a steady rate, which no source joins
paths           Links that stand still now and then: the age of rows by the way in which copies of a stage are read
feed_costs      Bytes over links, and rows a second, by the way in which copies of a stage are read
window_gaps     Gaps in the results of windows when executors are killed, with and without an order of steps
failover        Faults, seen from outside: gaps, old rows, and the time to full replication
move            Moves of partitions, seen from outside, while rows flow
grow            A plan that grows: additions, the quiet of other stages meanwhile, and many stages in one plan
skew            Uneven load, with static placement and with load balance
techniques      Costs of each recovery technique without faults, and its gain when an executor is killed
restart         Time until a query goes on after driver, executors and workers were killed at once
restart_peer    The peer of ``restart``: Structured Streaming with RocksDB
schedule        The order of checkpoints: in turn, or by the time that a recovery would take
kafka_read      Rows a second from a topic into Arrow columns, beside confluent-kafka
kafka_write     Rows a second into a topic, and the time of a small write, beside confluent-kafka
kafka_avro      Values of Avro and JSON to columns and back, with the same rows
streams         Streams in and out of a query, one case at a time, on this machine
streams_out     Output as a stream of Spark's, beside a Python data source without Flux
stream_sources  Sources in the workers beside other ways to the same rows
serve           Events pushed to a gateway over HTTP, beside bare flushes of the disk
serve_queries   Registered queries behind such pushes: from a push to the reader of a filter, and registrations
serve_readers   Readers of one result beside another one that never reads, and without it
serve_restart   A service that is stopped and started again: the time until the first new result
serve_process   ``flux serve`` in a process of its own, to be killed and started again
scale           Costs that grow with the cluster: an epoch, an ack, a heartbeat, a repair
scale_real      CPU per row of 2, 4 and 8 real workers that share one load
virtual         A cluster of any size on one thread: a real controller, and workers that only answer
one_loss        The loss of one worker of a large cluster, seen by the controller
data            Parquet files that both sides read
paced           Rows that are due at a steady rate, made from their number alone, so that they can be made again and counted
arrivals        A sink that notes arriving rows and their times, and an evaluation of its notes at the end
operating       Progress of a running query, and requests of the flux command
timeline        The picture of a benchmark: throughput and latency over time
figures         The picture of the figures in README.md
ports           Ports for servers that listen some seconds later
session         The Spark session of the benchmarks: real executors on this machine
machine         Speed of this machine and its Python at the moment
"""
