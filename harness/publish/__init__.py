"""Numbers into things people read."""
