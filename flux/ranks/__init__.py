"""Duplicates and ranks: the first row of each key, the last one, and the best ones.

kernels        Compiled loops of this room
warm_up        Compilation of these kernels, or their loading from the disk cache
first_rows     State of deduplication: when each key may come again
dedup          The operator that leaves out duplicates
"""
