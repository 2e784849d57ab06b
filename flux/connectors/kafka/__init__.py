"""Kafka topics as sources, which know by offset from where each row came, and as sinks, which write each record once.

source        ``flux.kafka``
sink_options  ``flux.to_kafka``
errors        Errors of Kafka, by their causes
"""
