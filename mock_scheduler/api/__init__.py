"""Holds the functions and classes behind the names of ``mock_scheduler``."""
