"""Changes of the plan of a running query, from its own program (design: additions).

running_plan    The newest plan of a running query, with the declarations of its parts
added_flows     Checks of flows that are to be added, before any process hears of them
imported_files  Files of imported modules, which stay as they are while stages of them run
additions       The methods of a query that add stages, sinks and sources
"""
