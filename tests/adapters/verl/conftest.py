"""What verl's adapter changes for its whole process is put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _level_of_the_library() -> Iterator[None]:
    logger = logging.getLogger("mock_scheduler")
    level = logger.level
    yield
    logger.setLevel(level)
