"""What the adapter of slime, miles and vime says about them."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="slime, miles, vime",
    distribution=None,  # slime of PyPI is another project
    tried=(),
    tried_parts=(
        "slime 0.3.1 (624b824a8): Sample, outputs, data source",
        "miles (31f1ca961): Sample",
    ),
    seam="--rollout-function-path",
    suppressed="engines, their GPUs, weight updates, evaluation",
    page="docs/frameworks/slime.md",
)
