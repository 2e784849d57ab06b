"""Folders of files that keep coming, as sources: each row once, in an order that is written down before it is read."""
