"""Keeps partitions owned, whole and balanced. Not on the data path."""
