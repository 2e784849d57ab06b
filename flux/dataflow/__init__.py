"""What a user declares: stages, operators, sources, and the plan they become."""
