"""One worker of a query, without I/O: its replicas, its streams, its sources, and the next step.

core                  One worker's share of a query, without I/O: replicas, their streams, and sources
table_follower        The newest table, which mostly arrives as changes
replica_lifecycle     The making of the replicas that the newest table places here, and the end of others
hosted_replicas       The replicas that a worker hosts by the newest table, as its other parts see them
subscriptions         The streams that a worker reads: offers, the chosen replica of each producer, acks
source_scheduler      The partitions of sources that a worker reads: the next one, and the way of its batches
watermarks            The watermarks that primaries order next, from statements about the streams that they read
step_scheduler        The choice of the partition of a worker that applies its next step
pacing                Intervals at which a busy worker reads its sources, so that small batches start together
checkpoint_scheduler  The schedule by which primaries send checkpoints to their standbys
output_delivery       Output that leaves the dataflow, and reports of complete partitions
report                Figures that a worker reports with its heartbeats
effects               Requests of a worker's state machine to its shell, and the links that these need
"""
