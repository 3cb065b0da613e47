"""Cuts a step's batch into updates and micro-batches, before any layout is known, and checks the result."""
