"""A user's declarations - sources, stages, sinks - and the plan of them.

source           Origins of rows
source_reader    The contract of a source that workers read
threaded_reader  A thread that reads ahead of a worker from a reader that may block
ledger           Decisions of the readers of a source, one entry after another, in a folder that all workers reach
schema           Schemas in Spark's DDL, read without Spark, so that a stage can be tried where there is no session
operator         Operators, the work of a stage on its rows
attributes       State of operators that define neither ``snapshot`` nor ``restore``
aggregate        Aggregate
user_code        Text about the user's code and objects
flow             The decorator ``flux.stage``, and the flow that is built of decorated stages
sink             Sinks, which bring the output of a flow outside
sink_check       A trial of a sink, as queries use it among faults (``flux.testing.check_sink``)
collect          The operator at the end of ``toDF()``
write_stream     ``flow.writeStream``
batches          Batches as they come from users and sources
plain_columns    Columns as they travel
plan             The dataflow as workers see it
"""
