"""Sockets, clocks and threads around the machines that decide."""
