"""Reports to people and programs: events, progress, watermarks, silent inputs, metrics.

events      Events of replicas and workers, kept for ``lastProgress``, the history and the log
progress    Progress reports (``query.lastProgress``), made from the workers' reports
watermarks  Event time in reports: watermarks, the partitions that hold them back, late rows
silence     Inputs that do not answer, and that results go on without
feeds       Streams that are read over several feeds, and the price of it
links       Links between workers over which nothing comes, and the workers that are read instead
failures    Inputs that are missing: since when, and the tentative results and corrections of each failure
metrics     The metrics of one query for Prometheus, and their server
"""
