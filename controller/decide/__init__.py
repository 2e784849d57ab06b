"""The controller itself: the processes that take part, losses, repairs and moves, and requests."""
