"""Runs an alignment: plans the baseline and its candidates, launches them one after another, collects and compares."""
