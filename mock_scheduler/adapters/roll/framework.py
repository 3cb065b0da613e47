"""What the adapter of ROLL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="ROLL",
    distribution=None,  # roll of PyPI is another project
    tried=(),
    seam="the pipeline's RolloutScheduler, within its Ray actor",
    suppressed="inference and reward clusters, environment workers, weight updates",
    page="docs/frameworks/roll.md",
)
