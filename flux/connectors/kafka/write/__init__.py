"""Partitions of topics as they are written inside a worker.

sequence_operator   The stage before a topic
partition_batches   Rows of an output batch, by partition of the topic, and the record batches that carry them
sink                ``to_kafka``
transactional_sink  ``to_kafka`` with transactions
"""
