"""Alignment runs: plan the baseline and its candidates, launch them one after another, collect and compare."""
