"""The controller, which keeps partitions owned, whole and balanced. It is not on the data path."""
