"""Replicas of a partition: the same steps in the same order, and copies of their state."""
