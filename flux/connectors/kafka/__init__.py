"""Kafka topics as sources, which know by offset from where each row came, and as sinks, which write each record once.

source        ``flux.kafka``: its options, and the beginning of a query, settled once
sink_options  ``flux.to_kafka``: its options, checked where the flow is made; then a stage and a sink
errors        Errors of Kafka, by their causes, with topic, partition, offset and a remedy
warm_up       Compilation of the kernels of these packages, or their loading from the disk cache
"""
