"""What the adapter of Ray says about it."""

from mock_scheduler.adapters.frameworks import Framework

FRAMEWORK = Framework(
    name="Ray",
    distribution="ray",
    tried=("2.60.0",),
    seam="an actor's handle as the real scheduler; the proxy within an actor",
    suppressed="calls of the actor",
    page="docs/ray.md",
)
