"""The gateway: a process that takes events over HTTP and answers when they are on disk (design: gateway).

problems     Refusals, in one form
answers      Answers as they travel
routes       Requests of HTTP as actions, without I/O
tokens       Tokens and their rights
bodies       Bodies of requests as rows, within bounds
misfits      The row, column and reason for which a body does not fit
log_writer   A thread that owns a log: one flush for all requests that wait
gateway      The actions of a gateway on its location
forwarder    Pushes to logs of other gateways, passed on to these
openapi      The document that describes the API
app          The gateway on Starlette
connections  Connections within bounds: their number, the size of a head and the time for it
serve        A gateway on a port, until a signal

The rooms ``reads`` and ``webhooks`` have results of queries, on their way to readers and to receivers.
"""
