"""Declarations of users (stages, operators, sources), and the plan made of them."""
