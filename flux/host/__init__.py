"""All that one worker hosts, and whose turn it is."""
