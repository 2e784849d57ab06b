"""Event logs: rows that were pushed from outside, on disk before the push is answered (design: event-log).

records       Records of a log, and the head of each of its segments
log_store     The place of one log, as its owner and its readers use it
chain         Segments that belong to a log: each names the one before it, and where that ends
log_owner     The owner of a log: pushes in, answers out when they are on disk
log_reader    A reader of a log by position, beside its owner
documents     Documents of a location with definitions by name
streams       Registered streams, and the documents that a location has of them
verification  The events of a location, read to find damage
source        A stream that gateways fill, as a source of queries
"""
