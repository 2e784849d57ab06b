"""Replicas of a partition: the same steps in the same order.

replica           One replica of a partition: its pending slices, its next step, and its end
step_queue        Slices that are received and not yet applied, and the steps that are made of them
event_clock       The watermarks of a replica: those in its order, and as primary the next ones
order_log         The order log that keeps the replicas of a partition identical, as a state machine without I/O
order_exchange    The traffic of order logs between the replicas of one worker and those on other workers
kinds             Kinds of replicas: the questions whose answers differ from kind to kind
release           The release rule: output is held back until its steps are committed
output            The output of a replica, from its operator to its consumers
output_checksums  Running checksums of a replica's output, by which it is compared with the others
deltas            For each standby, the checkpoint to which the next changes apply
batched_steps     Steps of several partitions of a stage, applied with one call of their operators
user_code_guard   The operator of a replica, and errors of user code with stage, partition, stream and first bad row
snapshot          Operator state to bytes and back
"""
