"""What the adapter of verl says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="verl",
    distribution="verl",
    tried=("0.9.1",),
    needs=("ray", "tensordict", "TransferQueue"),
    seam="agent_loop_manager_class of trainer V0; trainer modes mock_… and custom_sampler of V1",
    suppressed="engines, weight updates, reward workers, teachers",
    page="docs/frameworks/verl.md",
)
