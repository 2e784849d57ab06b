"""The controller: the owner of every partition, before and after faults and moves.

alignment  Alignment of sources: how far a reader may be ahead of the one that is farthest behind
server     The controller's thread: socket and clock around the state machine
text       Counts and lists of numbers in sentences for people, the same everywhere
"""
