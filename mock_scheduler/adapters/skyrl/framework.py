"""What the adapter of SkyRL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="SkyRL",
    distribution="skyrl",
    tried=(),
    tried_parts=("0.4.0: experiment, trainer and data loader, without engines and workers",),
    seam="get_generator of the experiment: the generator",
    suppressed="inference engines, weight updates",
    page="docs/frameworks/skyrl.md",
)
