"""Requests of people to a running query: their form, their answers, the command line."""
