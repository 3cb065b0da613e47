"""Lets one process train as a layout of several does: the library's engine over this pipeline's micro-batches."""
