"""NeMo-RL's GRPO with recorded rollouts. ``docs/frameworks/nemo_rl.md`` has the lines to add."""
