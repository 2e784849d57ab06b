"""A user's declarations - sources, stages, sinks - and the plan of them.

source           ``flux.source`` and ``flux.stream``: origins of rows
source_reader    The contract of a source that workers read, and of the reader of one partition
threaded_reader  A thread that reads ahead of a worker from a reader that may block
sink             ``flux.Sink``: the contract of sinks, and the flow that ends in one
row_operators    Conditions and columns of flows and sources, under the names of DataFrames
availability     The bound on the time to a result while an input is missing, and its policies
event_time       ``withWatermark``: the column of times of a source, and how late a row may come
flow             The decorator ``flux.stage``, and the flow that is built of decorated stages
row_flow         Flows of conditions and columns, with a watermark in front of them or without
grouping         Groups of rows and their aggregates, under the names of DataFrames
write_stream     ``flow.writeStream``: the sinks of a flow under the names of Structured Streaming
plan             The plan: sources, stages and edges, frozen and shipped with the tasks
plan_change      Changes of the plan of a running query, and the versions of a plan
"""
