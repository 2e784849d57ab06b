"""Partitions of topics as they are read inside a worker.

partition_reader  The reader of one partition of a topic, for the worker that takes its batches
fetch_schedule    The partitions to be asked for next, the broker of each, and the time; no sockets, no clock
fetch_thread      The thread that fetches for all partitions of a source that a process reads
group_commit      Commits of a consumer group, for tools that show its lag
dead_letters      Records that do not fit their format, written to a topic of their own
"""
