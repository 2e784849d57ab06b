"""Record batches of Kafka as columns, and back.

decoder      Record batches of Kafka (format 2), as a broker sends them, to Arrow columns
encoder      Arrow columns to record batches of Kafka (format 2), and the partition of a key as Kafka's Java client chooses it
compression  Compression and decompression of the records of a batch, as bytes
kernels      Compiled loops over records: to columns and back, checksums, partitions by key
"""
