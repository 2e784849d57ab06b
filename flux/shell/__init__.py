"""Sockets, clocks and threads around the state machines."""
