"""Durable state, which outlives all workers and the driver: checkpoints and the order of steps, in a directory."""
