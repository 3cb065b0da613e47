"""verl, with recorded rollouts (``docs/frameworks/verl.md``)."""
