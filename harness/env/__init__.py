"""What software is this, exactly? spec -> lock -> build (+ patch) -> validate."""
