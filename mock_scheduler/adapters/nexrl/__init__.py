"""NexRL's debug dumps: their files, rollouts read from them, and their comparison (``docs/nexrl.md``)."""
