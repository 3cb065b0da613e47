"""Bounds that are measured: what moving a baseline's weights by one rounding makes of every tensor and metric."""
