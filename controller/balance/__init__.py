"""Load of workers and partitions, and the moves that would even it.

load          Loads of replicas and workers, which policies look at, and moves, which policies suggest
load_reports  Loads made from the workers' reports: counts since the start become rates
rounds        Rounds of load balance: the policy that is asked, and the handling of its suggestions
policy_check  A trial of a policy, in a small model of a cluster (``flux.testing.check_policy``)
"""
