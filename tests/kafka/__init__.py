"""Tests with a real Kafka broker, and the broker."""
