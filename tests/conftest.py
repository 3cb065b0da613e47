"""What all tests share: property tests without a time limit per example, since the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", deadline=None, max_examples=50)
settings.load_profile("steady")
