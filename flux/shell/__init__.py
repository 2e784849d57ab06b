"""Sockets, clocks and threads around the state machines.

worker_loop      The loop of one worker: sockets and clock around its state machine
transport        Sockets: the only importer of zmq beside the authentication of ports
authentication   A thread that looks after connections to ports until they have proved the query's secret
worker_links     Links to other workers, opened when there is something to send
lifeline         A plain TCP connection from each worker to the controller that says one thing
liveness_thread  A sign of life that needs no interpreter lock, so that busy and stopped are told apart
step_watch       A thread beside a worker's loop that reports a long step of the user's code
sink_threads     The threads of a worker in which sinks are called
ingress_loop     The loop of one Spark ingress task: it reads, waits for room, sends, and ends when all is acked
output_loops     The loops of readers of output, in the program and in egress tasks
vault_process    The process of a vault: a worker's loop around ``flux.vault.vault``
process          The common part of the loops of workers and ingress tasks
threads          One thread of a worker for jobs that would hold up its partitions
"""
