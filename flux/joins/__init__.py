"""Joins: rows of two inputs with equal keys, which wait for each other in state.

join_spec  The declaration of a join: kind, keys, bounds of event time, given columns
"""
