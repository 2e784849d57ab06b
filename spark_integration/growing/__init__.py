"""Changes of the plan of a running query, from its own program (design: additions).

running_plan    The newest plan of a running query, with the declarations of its parts
added_flows     Checks of flows that are to be added, before any process hears of them
imported_files  Files of imported modules, which stay as they are while stages of them run
kept_versions   The versions of a plan in a checkpoint location: ids, versions and shares of log by name
plan_keeper     The thread that writes versions of a running query's plan into its checkpoint location
regrown         A plan that has grown, compiled again from a program that declares all flows at once
flow_ends       Flows that a query was given, from which failed stages begin anew
additions       The methods of a query that add stages, sinks and sources
"""
