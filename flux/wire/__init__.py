"""Messages between processes, their encoding, and proof of their senders."""
