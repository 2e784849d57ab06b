"""Load of workers and partitions, and the moves that would even it.

load          Loads of replicas and workers, which policies look at, and moves, which policies suggest
load_reports  Loads made from the workers' reports
rounds        Rounds of load balance
policy_check  A trial of a policy, in a small model of a cluster (``flux.testing.check_policy``)
"""
