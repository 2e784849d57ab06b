"""Partitions of topics as they are written inside a worker.

sequence_operator   The stage before a topic: the partition of each row, and its number there
partition_batches   Rows of an output batch, by partition of the topic, and the record batches that carry them
sink                ``to_kafka`` without transactions: each record once, by the sequences of an idempotent producer
tentative_records   Results that may still change, as records that are taken back by their key
transactional_sink  ``to_kafka`` with transactions: all records of one write become visible together
"""
