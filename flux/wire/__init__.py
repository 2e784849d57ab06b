"""Messages: what travels between processes, and the proof of the right to send it.

messages     Messages between producers and consumers of a stream, and between replicas of a partition
control      Messages between the controller and the other processes
statistics   Statistics that processes send with their heartbeats, by name and with bounds
pulse        Notes of a worker's loop about its activity, which go over the lifeline
codec        Encoding of messages between workers and of control messages
frames       Encoding of one message, with checks of version and length
bundle       Several small messages to the same receiver as one
checksum     Running checksum of a stream, to tell whether a retried task reads the same rows again
parts        Bytes on their way to another worker in parts, of which a few are under way at the same time
handshake    Mutual proof of the query's secret, without sending it and without I/O
safe_pickle  Pickles of values and arrays, and of no code
"""
