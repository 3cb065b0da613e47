"""What makes a run repeatable: the settings, when they are applied, their read-back and agreement across ranks.

``settings`` and ``environment`` import no torch, since they must be able to run before it; ``guard`` and
``agreement`` do. Import the modules themselves.
"""
