"""Turn one neutral plan into running processes."""
