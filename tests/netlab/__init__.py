"""A network laboratory: hosts in network namespaces, links that are cut, delayed and stalled, and Spark on these hosts.

In reading order: ``rtnetlink`` (devices and routes), ``namespaces``, ``forwarder`` (delay, loss and stalls of packets), ``lab``
(the network), ``cluster`` (Spark in it). ``python -m tests.netlab --cut w1:w2 --for 10`` shows a cut to people.
``python -m tests.netlab.faults`` strikes queries at random times: ``fault_schedule`` (faults), ``feeder`` (rows, sink, answer).
"""
