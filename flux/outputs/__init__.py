"""Output logs: the results of a query on disk, each at one position, for any number of readers (design: output-log).

catalogue    Registered outputs, and the place of their logs
log_owner    The owner of an output log: results of a stage in, each exit once
sink         The sink that writes the results of a flow into an output log
cursor       The place of a reader in an output
reader       A reader of an output by cursor
row_text     Rows as JSON
"""
