"""Standbys and positions in a checkpoint location, which outlive all workers and the driver.

vault            The vault
journal          Standbys that outlive their process
location         Places of data that outlives a query's processes
names            The name of a checkpoint directory
directory_store  A directory on a local or mounted file system, as the place of a journal
object_store     A journal in objects that are written once
"""
