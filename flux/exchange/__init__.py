"""One stream from one producer to its consumers: numbered, logged, acked, within credit.

log                The log of a stream: a batch stays until each consumer that may ask for it has acked it
producer           The sending end of one stream, as a state machine without I/O
consumer_progress  The progress of a producer towards one worker: entries sent, entries acked, and the next ones
consumer_map       The consumers of the streams into one stage, by the newest table
slices             Runs: small batches that travel in one message, and rows that carry their number
bounds             Statements about the watermark of one stream, to the workers that consume it
feed               One way over which a worker reads a stream: a connection, under one handshake
inbound            The receiving end of one stream at one worker, as a state machine without I/O
marks              Marks: points at which a consumer keeps the checksum of a stream, to check a second reading
replay_check       Evidence of earlier lives of a stream, shown by consumers
retention          The settled point of a stream of numbered rows: no row before it is needed any more
timed_rows         Rows of one source partition by their event time: on time or late
source_streams     The streams of one partition of a source, the same for both kinds of readers
"""
