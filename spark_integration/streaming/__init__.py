"""Structured Streaming as a source, and as a reader and writer of queries.

stream_source   The streaming queries of Spark that feed the sources of a query
stream_ends     The rows that a streaming query has given, kept beside the state of the query that it feeds
table_refresh   Tables that are read anew while a query runs: read and sent
table_versions  Versions of such a table: kept, judged, and the times of their readings
ingress_file    The file in which streaming queries find the inputs of a running query
stream_writer   ``df.writeStream.format("flux")``: a streaming query into a running query
stream_reader   The output of a running query as a stream of Spark's
flux_format     The data source ``flux`` of PySpark, in processes of Spark's own
"""
