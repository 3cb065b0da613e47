"""Compares debug dumps: ``python -m mock_scheduler.compare_debug_dumps``."""
