"""What makes a run repeatable: the settings, when they are applied, their read-back and agreement across ranks.

``settings``, ``environment``, ``megatron_rules`` and ``table`` import no torch, since they run before it; ``probes``,
``guard`` and ``agreement`` do. Import the modules themselves.
"""
