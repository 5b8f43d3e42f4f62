"""What will be run, exactly? recipe -> plan."""
