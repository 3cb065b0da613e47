"""Measured bounds: moving a baseline's weights by one rounding moves every tensor and metric by its own noise."""
