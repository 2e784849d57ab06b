"""Spark jobs and tasks that workers and ingress run in.

jobs                  The Spark jobs behind a query, and failed attempts at their tasks
worker_tasks          Spark tasks for the workers of a query, also of those that join later
entry_points          Functions that run inside tasks: worker, ingress, and the identity of their process
dataframe_partitions  Partitions of a DataFrame's files, the same at each start on a checkpoint location
shipping_checks       Checks of everything that travels to the executors
decommission          Workers on decommissioned executors, which are drained before these go
"""
