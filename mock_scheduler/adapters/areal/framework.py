"""What the adapter of AReaL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="AReaL",
    distribution="areal",
    tried=(),
    tried_parts=("1.0.4: RTensor, joining of samples, cycle_dataloader",),
    seam="PPOTrainer's actor.prepare_batch",
    suppressed="inference engines, weight updates, evaluation",
    page="docs/frameworks/areal.md",
)
