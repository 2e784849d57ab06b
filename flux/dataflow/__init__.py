"""A user's declarations - sources, stages, sinks - and the plan of them.

source           ``flux.source`` and ``flux.stream``: origins of rows
source_reader    The contract of a source that workers read, and of the reader of one partition
threaded_reader  A thread that reads ahead of a worker from a reader that may block
ledger           Decisions of the readers of a source, one entry after another, in a folder that all workers reach
schema           Schemas in Spark's DDL, read without Spark, so that a stage can be tried where there is no session
operator         ``flux.Operator``: the contract between the exchange and the user's code
attributes       State of operators that define neither ``snapshot`` nor ``restore``
aggregate        ``flux.Aggregate``: count, sum, min, max and mean per key, with Spark SQL's answers
user_code        Errors of the user's code as text, with their files and lines, without the frames of Flux
flow             The decorator ``flux.stage``, and the flow that is built of decorated stages
sink             ``flux.Sink``: the contract of sinks, and the flow that ends in one
sink_check       A trial of a sink, as queries use it among faults (``flux.testing.check_sink``)
collect          The operator at the end of ``toDF()``, which keeps output until tasks have fetched it
write_stream     ``flow.writeStream``: the sinks of a flow under the names of Structured Streaming
batches          Batches of users and sources, checked against their schema and cut to size
plain_columns    Columns in the types in which they travel, without dictionaries and views
plan             The plan: sources, stages and edges, frozen and shipped with the tasks
"""
