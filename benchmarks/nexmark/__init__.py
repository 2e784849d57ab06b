"""The 23 queries of Nexmark, compared with an oracle.

outputs   Outputs of queries, thrown away or kept
checkout  Queries, events and oracle, which are not installed
"""
