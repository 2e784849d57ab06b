"""What people ask of a running query: requests, answers, the command line."""
