"""AReaL's PPOTrainer with recorded rollouts. ``docs/frameworks/areal.md`` has the lines to add."""
