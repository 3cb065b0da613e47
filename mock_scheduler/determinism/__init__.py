"""What makes a run repeatable: the settings, when they are applied, their read-back and agreement across ranks.

``settings``, ``environment``, ``megatron``, ``doctor``, ``operations`` and ``table`` import no torch, since they run
before it or without it; ``probes``, ``guard``, ``agreement`` and ``operations.recorder`` do.
"""
