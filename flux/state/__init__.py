"""State on its way: copies for new replicas, changes for standbys, and the standbys themselves.

state_copy     A replica's state as one value that travels, taken between two steps
sender         Copies of state on their way from one worker to another, as a state machine without I/O
receiver       Copies of state that arrive at a worker, as a state machine without I/O
copies_sent    Copies on their way from a worker, which its acks must not pass
phases         The phases of a copy of state on its way, at both of its ends
replay_points  Replay points, which an upstream replica gets in place of checkpoints
standby        A replica without an operator: a checkpoint, and the order of the steps after it
jobs           Jobs that another thread does for a state machine
"""
