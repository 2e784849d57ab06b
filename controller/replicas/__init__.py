"""Replicas in the table: their places, and the steps of repairs and moves."""
