"""Places of replicas: the first ones, additions after losses, moves, spread over hosts.

table_index        The table as arrays, for reports about all replicas of a large query
kinds              Kinds of replicas in a partition: wanted, missing and surplus ones, and heirs
membership         The processes that take part in a query, each life of a process by itself
placement          The place of each replica, in the first table and after
spread             Distance between replicas: different domains, hosts and executors
additions          The next replicas to add: stages in topological order, a few partitions at a time
addition_limits    Limits on attempts to add a replica, and on how many begin with one table
replica_safety     The safety of replicas, and their lags behind their primaries
addition_tracker   Additions under way, and the history of replicas
moves              The queue of moves, and the fate of a move when a worker is lost half-way
table_changes      AddReplica and DropReplica as changes of the table
protection_wishes  The number and kinds of replicas that each stage is to have, by plan or by request
vault_replicas     Replicas in a checkpoint location, if a query has one
"""
