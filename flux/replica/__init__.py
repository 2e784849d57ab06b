"""Replicas of a partition: the same steps in the same order.

replica           One replica of a partition of a stage
step_queue        The pending slices of a replica
order_log         The order log that keeps the replicas of a partition identical, as a state machine without I/O
order_exchange    The traffic of order logs between the replicas of one worker and those on other workers
kinds             Kinds of replicas at a worker
release           Release
output            The end of a replica's output inside the dataflow
output_checksums  Running checksums of a replica's output, by which it is compared with the others
deltas            Changes for standbys
batched_steps     Steps of several partitions of a stage, applied with one call of their operators
user_code_guard   Errors of user code with their place
snapshot          Conversion of operator state to bytes and back
"""
