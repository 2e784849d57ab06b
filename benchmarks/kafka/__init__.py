"""``flux bench kafka``: a running count per key, from a topic to a topic, in Flux and in its peers."""
