"""What travels between processes: messages, their encoding, and proof of who sends them."""
