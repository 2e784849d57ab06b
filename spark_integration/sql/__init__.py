"""SQL over flows: Spark parses and analyses a text, and the parsed tree becomes calls of the fluent layer (design: sql).

query      ``flux.sql``: from a text and flows to a flow
text            Places in a text, and errors that name them
analysis        A session of its own for each text, in which it is parsed and analysed over empty DataFrames
accepted_nodes  The closed list of nodes, and the check of a parsed tree against it
functions       The closed list of functions
refusals        Reasons for nodes outside the list, with the nearest accepted form
relations       Relations of a parsed tree, as flows: FROM, WHERE, JOIN, UNION ALL, DISTINCT, WITH
groups          GROUP BY, windows, aggregates and HAVING, as groups of a flow
trees           Spark's trees, as Python reads and changes them
"""
