"""Places of replicas: the first ones, additions after losses, moves, spread over hosts.

table_index        The table as arrays
kinds              Kinds of replicas at the controller
membership         Members
placement          Placement
spread             Distance between the replicas of a partition
slots              Slots, which tasks fill with workers, and drains of workers before they leave
additions          The next additions
addition_limits    Failed attempts to add a replica
addition_tracker   Knowledge of the controller about replicas beyond the table
moves              The queue of moves
table_changes      AddReplica and DropReplica as changes of the table
protection_wishes  Wishes
vault_replicas     Replicas in a checkpoint location, if a query has one
lags               Lags of replicas behind their primaries, as the primaries' workers report
"""
