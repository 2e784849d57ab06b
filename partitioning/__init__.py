"""Ownership of rows: hashing, clustering, tables of replicas, keyed state."""
