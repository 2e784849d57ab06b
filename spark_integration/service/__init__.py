"""``flux serve``: streams, queries and outputs over HTTP, on one plan that grows (design: service).

shipped            Functions and readers of the plan that run in workers
flows              Registered streams and queries as flows
declared_flows     Flows of registered queries over a plan that runs
kept_flows         Flows of registered texts, kept in the location for the next start
service_plan       The one growing query, in which registered queries come and go
registrar          Registrations and removals, carried out one after the other
registry_port      The port on which gateways reach the service
attached_gateways  Gateways as processes of a service, started again when they end
class_archive      An archive of Spark's classes, with which its JVM begins faster
start_times        Times of the parts of a start
stream_service     The service: its plan, its port and its gateways
command            The program of ``flux serve``
"""
