"""What the library says about Megatron-LM's and Megatron-Bridge's own training loops."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="Megatron-LM, Megatron-Bridge",
    distribution="megatron-core",
    tried=("0.16.1", "0.19.2"),
    tried_parts=(
        "Megatron-Bridge 0.6.2: training/callbacks.py, models and adapters",
        "Megatron-LM after 0.19.2: the signatures of training/callbacks.py",
    ),
    seam="pretrain(callbacks=[megatron.AttachCallback()]); megatron.attach_to_pretrain() where it takes none",
    suppressed="nothing: no rollouts are played",
    page="docs/frameworks/megatron.md",
)
