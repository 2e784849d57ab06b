"""The controller: the owner of every partition, before and after faults and moves.

plan_compiler  Compilation of a user's flow to a checked plan
server         The controller's thread
explain        A plan as text for people
text           Counts and lists of numbers in sentences for people, the same everywhere
"""
