"""ROLL's agentic pipeline with recorded rollouts. ``docs/frameworks/roll.md`` has the lines to add."""
