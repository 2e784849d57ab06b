"""Duplicates and ranks: the first row of each key, the last one, and the best ones.

kernels        Compiled loops of this room
warm_up        Compilation of these kernels, or their loading from the disk cache
first_rows     State of deduplication: when each key may come again
dedup          The operator that leaves out duplicates
order_keys     Keys of order: bytes for each row, whose order is that of the rows
row_arena      Rows of a state, by number
best_rows      State of ranks: the best rows of each key
top            The operators of ranks: within windows, at any time, and the last row
"""
