"""SkyRL's trainer with recorded rollouts. ``docs/frameworks/skyrl.md`` has the lines to add."""
