"""Python data sources of PySpark, read inside workers.

batch   ``flux.datasource``
stream  A streaming data source inside a worker
rows    Rows and record batches of Python data sources, as record batches
"""
