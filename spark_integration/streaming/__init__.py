"""Structured Streaming as a source, and as a reader and writer of queries.

stream_source  The streaming queries of Spark that feed the sources of a query
ingress_file   The ingress file, in which the streaming queries of a program find the inputs of a running query that they
               write into
stream_writer  ``df.writeStream.format("flux")``
stream_reader  The output of a running query as a stream of Spark's
flux_format    The data source ``flux`` of PySpark
"""
