"""What the adapter of NeMo-RL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="NeMo-RL",
    distribution=None,
    tried=(),
    tried_parts=("7ea279abf: setup, grpo_train, rollouts and environments, without engines and policy workers",),
    seam="rollout functions of grpo_train",
    suppressed="inference engines, weight updates, environments",
    page="docs/frameworks/nemo_rl.md",
)
