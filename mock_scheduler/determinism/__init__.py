"""Repeatable runs: the settings, when they are applied, their read-back and agreement across ranks.

``settings``, ``environment`` and ``operations`` import no torch, since they run before it or without it; ``probes``,
``guard``, ``agreement`` and ``operations.recorder`` do.
"""
