"""Partitions: the owner of each row, and keyed state in columns.

ids           Ids of streams, partitions and sources, and the kinds of replicas
clustering    From key columns to hashes and partitions, and batches whose rows are sorted by partition
table         The table of replicas: the owners of all partitions, numbered by epoch
columns       Arrow columns as addresses and kinds, which kernels take without a copy
keyed_state   Keyed state: groups of rows with equal keys, and the value of each measure for each group
key_index     Slots of the keys of one partition, so that state lives in arrays indexed by slot
slot_tables   Hash tables from keys to dense slots 0, 1, 2, ... in order of first appearance, one per shape of key
accumulators  Count, sum, min, max and mean of columns, one value per slot, with Spark SQL's answers (ANSI mode)
exact_sums    Sums of doubles that are rounded once, and so are the same for any order of rows
kernels       Compiled loops over rows, without any policy
find_kernels  Compiled look-ups of keys, which enter nothing
warm_up       Compilation of the kernels, or their loading from the disk cache, before rows wait for them
errors        Errors about columns and keyed state, which name the column and what would work
"""
