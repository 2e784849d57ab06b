"""Structured Streaming as a source, and as a reader and writer of queries.

stream_source  The streaming queries of Spark that feed the sources of a query
ingress_file   The file in which streaming queries find the inputs of a running query
stream_writer  ``df.writeStream.format("flux")``: a streaming query into a running query
stream_reader  The output of a running query as a stream of Spark's
flux_format    The data source ``flux`` of PySpark, in processes of Spark's own
"""
