"""Folders of files that keep coming, as sources: each row once, in an order that is written down before it is read. And
folders of Parquet files as sinks.

source             ``flux.files``: a folder of files that keep coming, as a source of a flow
listing            The files of a folder that are to be read, each once and with its identity
completion         The wait until files are complete, as a state machine
watch              The order in which files are read, settled in a ledger before their rows go out
reader             The reader of one partition: every n-th file, one after the other
formats            Parquet, CSV and JSON to batches of a schema, the same rows whenever they are read
text_streams       Files of text as pyarrow's parsers of CSV and JSON should see them
parquet_sink       ``flow.to_parquet``: ordered steps decide where a file ends, so each replica would write the same
partition_columns  ``partitionBy``: the folders of rows by the values of columns, under Spark's names
errors             Errors about the files of a folder, with the name of the file and the way out
"""
