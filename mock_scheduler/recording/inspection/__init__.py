"""Looks at recordings: statistics, verification, and differences of two."""
