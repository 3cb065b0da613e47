"""Settings make a run repeatable: their table, their application in time, their read-back and agreement across ranks.

``settings``, ``environment``, ``agreement_rounds`` and ``operations.log`` import no torch, since they run before it or
without it; ``probes``, ``guard``, ``agreement`` and ``operations.recorder`` do.
"""
