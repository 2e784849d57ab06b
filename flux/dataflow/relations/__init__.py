"""Flows that look at several rows or inputs, declared as functions and methods of flows, and resolved when the plan is compiled;
and flows that go on from parts of a running query.

join_flow     Joins of two flows, and of a flow with a table
ranking       Flows with ranks or without duplicates, and ``flux.dedup``
as_of         ``flux.asof_join``
tops          ``flux.top`` and ``flux.last``
lookups       ``flux.lookup``: tables that are read anew while the query runs
running_flow  Handles on stages and sources of a running query
"""
