"""Reports for people and programs: events, progress, metrics."""
