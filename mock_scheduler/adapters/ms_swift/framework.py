"""What the adapter of ms-swift says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="ms-swift (Megatron)",
    distribution="ms-swift",
    tried=(),
    tried_parts=("4.6.0: MegatronGRPOTrainer's constructor, callbacks, rollout engine, samples and rewards",),
    needs=("megatron-core",),
    seam="--external_plugins and --callbacks mock_scheduler; _generate_completions of the trainers for GRPO and GKD",
    suppressed="vLLM, its server, weight updates, reward functions",
    page="docs/frameworks/ms_swift.md",
)
