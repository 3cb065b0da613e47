"""What the adapter of ROLL says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="ROLL",
    distribution=None,  # roll of PyPI is another project
    tried=(),
    tried_parts=("0.3.0 (8eb27cc2): DataProto in Ray's actors",),
    seam="the pipeline's RolloutScheduler, within its Ray actor",
    suppressed="inference and reward clusters, environment workers, weight updates",
    page="docs/frameworks/roll.md",
)
