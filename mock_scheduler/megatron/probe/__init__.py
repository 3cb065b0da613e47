"""A training step tells a probe of itself; probes write traces and put grafts in."""
