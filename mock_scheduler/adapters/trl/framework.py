"""What the adapter of TRL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="TRL",
    distribution="trl",
    tried=("1.16.0",),
    needs=("transformers", "accelerate", "datasets"),
    seam="rollout_func of GRPOTrainer; rollout_worker and weight_transfer of AsyncGRPOTrainer",
    suppressed="vLLM, its weight updates, generation, reward functions",
    page="docs/frameworks/trl.md",
)
