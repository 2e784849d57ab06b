"""Standbys and positions in a checkpoint location, which outlive all workers and the driver.

vault              A worker without operators that keeps a standby of every partition in a checkpoint location
plan_without_code  Plans and changes without code of the user's, for processes that run none of it
journal            Standbys that outlive their process: inputs are written down before answers leave
framing            Frames of a segment, which are found whole or not at all after a crash
location           Places of data that outlives a query's processes
names              The file beside a directory that tells which query uses its name
directory_store    A directory on a local or mounted file system, as the place of a journal
object_store       A journal in objects that are written once
"""
