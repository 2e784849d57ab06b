"""One stream from one producer to its consumers: numbered, logged, acked, within credit.

log                The log of a stream
producer           The sending end of one stream, as a state machine without I/O
consumer_progress  Entries of a log on their way to one worker
consumer_map       The consumers of the streams into one stage, by the newest table
slices             Runs
inbound            The receiving end of one stream at one worker, as a state machine without I/O
marks              Marks
checksum           Running checksum of a stream, to tell whether a retried task reads the same rows again
replay_check       Evidence of earlier lives of a stream, shown by consumers
retention          The settled point of a stream of numbered rows
source_streams     The streams of one partition of a source, the same for both kinds of readers
"""
