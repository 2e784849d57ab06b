"""Output logs: the results of a query on disk, each at one position, for any number of readers (design: output-log).

catalogue          Registered outputs, and the place of their logs
log_owner          The owner of an output log: results of a stage in, each exit once
sink               The sink that writes the results of a flow into an output log
cursor             The place of a reader in an output
reader             A reader of an output by cursor
tentative_channel  The side channel of an output: tentative rows, for gateways
tentative_sink     The sink that writes stable results into the log, and tentative ones into the channel
row_text           Rows as JSON
"""
