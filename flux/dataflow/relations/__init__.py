"""Flows that look at several rows or inputs, declared as functions and methods of flows, and resolved when the plan is compiled.

ranking  Duplicates and ranks
"""
