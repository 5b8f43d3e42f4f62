"""The parts of the simulated server: its cost model, its text, its wire, its faults, its group of ranks."""
