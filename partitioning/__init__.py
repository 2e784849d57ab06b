"""Whose row is it? Hashing, clustering, tables of replicas, keyed state."""
