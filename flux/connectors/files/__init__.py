"""Folders of files that keep coming, as sources: each row once, in an order that is written down before it is read. And
folders of Parquet files as sinks.

source        ``flux.files``
listing       Listings of a folder
completion    The wait until files are complete, as a state machine
watch         Watches of folders
reader        One partition of a source of files
formats       Formats of files in a folder
text_streams  Files of text as pyarrow's parsers of CSV and JSON should see them
parquet_sink  Parquet files as a sink
errors        Errors about the files of a folder
"""
