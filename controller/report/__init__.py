"""Reports to people and programs: events, progress, metrics.

events    Events of replicas and workers, kept for ``lastProgress``, the history and the log
progress  Progress reports (``query.lastProgress``), made from the workers' reports
metrics   The metrics of one query for Prometheus, and their server
"""
