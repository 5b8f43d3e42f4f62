"""Every formula once; pure."""
