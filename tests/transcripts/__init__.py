"""The main stories of the protocol as text, made by the real state machines in virtual time (design: transcripts).

Each ``*.txt`` is the course of one scripted flow in ``flows``, without random faults: a message takes one
millisecond, a turn of a process 0.2. A change of the protocol shows here as a change of text, to be reviewed like a
change of code. ``python -m tests.transcripts --write`` renews the files.
"""
