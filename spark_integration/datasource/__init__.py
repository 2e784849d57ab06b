"""Python data sources of PySpark, read inside workers.

batch   ``flux.datasource``: a Python data source of PySpark, planned once and read in workers
stream  A streaming data source inside a worker, with its ends in a ledger
rows    Rows and record batches of Python data sources, as record batches
"""
