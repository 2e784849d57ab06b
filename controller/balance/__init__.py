"""Load, and the policies that suggest moves."""
