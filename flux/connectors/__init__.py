"""Readers and writers of the outside: Kafka topics and folders of files."""
