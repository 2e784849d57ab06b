"""Readers and writers of the outside: Kafka topics and folders of files.

ledger  Decisions of the readers of a source, one entry after another, in a folder that all workers reach
"""
