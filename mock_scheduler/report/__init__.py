"""Reports of an alignment run: for the terminal, and as JSON."""
