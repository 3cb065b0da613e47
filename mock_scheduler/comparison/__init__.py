"""Compares what two runs computed: metrics, gradients, parameters and everything between.

Rooms, lowest first; each imports only rooms before it:

- ``residuals``, ``findings``, ``tensors``, ``thresholds``: data, and every number that decides;
- ``bounds``: how far a tensor or metric may be from the baseline's;
- ``measure``: the figures of two tensors;
- ``pairing``: brings two traces into one order, and finds what is on one side only;
- ``explain``: where a difference lies and what it looks like;
- ``walk``: compares two traces or two logs of metrics;
- ``noise``: measures the noise of a baseline, and looks for errors within it.
"""
