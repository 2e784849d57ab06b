"""Sockets, clocks and threads around the state machines.

worker_loop      The loop of one worker
transport        Sockets
authentication   A thread that looks after connections to ports until they have proved the query's secret
worker_links     Data links to other workers
lifeline         A plain TCP connection from each worker to the controller that says one thing
liveness_thread  A sign of life that needs no interpreter lock
step_watch       A thread beside a worker's loop that reports a long step of the user's code
sink_threads     The threads of a worker in which sinks are called
ingress_loop     The loop of one Spark ingress task
output_loops     The sockets and clock of one reader of output
vault_process    The process of a vault
process          The common part of the loops of workers and ingress tasks
threads          One thread of a worker for jobs that would hold up its partitions
"""
