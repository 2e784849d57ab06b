"""A Kafka cluster: connections, logins, topics, producers and transactions.

cluster       A cluster as a reader needs it: leaders, offsets, records as bytes, offsets of a group
connection    One connection to one broker: a request, its answer, one at a time, each within a limit
security      Connection options for brokers with TLS or a login, by the names that kafka-python gives them, checked at once
topic_ids     Ids of topics (KIP-516, brokers since Kafka 2.8), and positions that carry them
producer      A cluster as a writer needs it: producer ids, record batches to leaders, last sequences
transactions  A Kafka cluster as a writer of transactions needs it
kafka_python  The parts of kafka-python that Flux uses, in one place
"""
