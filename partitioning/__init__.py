"""Partitions: the owner of each row, and keyed state in columns.

ids           Ids of streams, partitions and sources, and the kinds of replicas
hashing       The partition of a row, first half
clustering    Clustered batches
table         The table of replicas
columns       Columns in the form that kernels take
keyed_state   Keyed state
key_index     Slots of the keys of one partition
slot_tables   Hash tables from keys to dense slots 0, 1, 2, ... in order of first appearance, one per shape of key
accumulators  Count, sum, min, max and mean of columns, one value per slot, with Spark SQL's answers (ANSI mode)
kernels       Compiled loops over rows
warm_up       Compilation of the kernels, or their loading from the disk cache, before rows wait for them
errors        Errors about columns and keyed state
"""
