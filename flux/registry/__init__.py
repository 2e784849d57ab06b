"""The registered queries of a service (``flux serve``): definitions, phases, and the way to it (design: registry).

definitions      Queries as they are registered, and checks of their parts
convergence      The next step that brings the plan and the outputs to the state of the registry, without I/O
query_catalogue  The document that has all registered queries
service_hold     The one service of a location: its claim, and the address under which gateways reach it
service_calls    Calls of a gateway to the service
"""
