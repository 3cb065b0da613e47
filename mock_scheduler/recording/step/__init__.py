"""Stores one step as a file: its header, its tensors in verified blocks, and the batch they hold."""
