"""One stream from one producer to its consumers: numbered, logged, acked, within credit."""
