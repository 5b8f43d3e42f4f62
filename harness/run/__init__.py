"""Make it happen; leave nothing behind."""
