"""The course of a query: its phases, and the versions of its plan.

query_phases   The phases of a query: the next phase for each event, and its message
"""
