"""What the adapter of megatron/rl says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="megatron/rl",
    distribution=None,  # in Megatron-LM's sources alone: no wheel of megatron-core has it
    tried=(),
    tried_parts=("Megatron-LM (d98e8a64): rollouts, groups, ledger, get_environment_rollouts, group statistics",),
    seam="megatron.rl.rl_utils.get_environment_rollouts, rebound",
    suppressed="inference server, inference mode, its weights, evaluation",
    page="docs/frameworks/megatron_rl.md",
)
