"""Spark jobs and tasks that workers and ingress run in.

jobs                  Failed attempts at the tasks of a query
worker_tasks          Spark tasks for the workers of a query, also of those that join later
entry_points          Functions that run inside the tasks
dataframe_partitions  Cuts of a DataFrame into partitions by Spark
decommission          Decommissioned executors give their partitions away before they go, and other workers come in their
                      place
"""
