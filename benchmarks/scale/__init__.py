"""Measures what grows with the number of ranks and with the size of a model: seconds, memory, handles, requests."""
