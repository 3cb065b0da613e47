"""Gives pytest the fixture ``assert_aligned``, which fails a test whose two runs do not compute the same.

pytest loads it by itself where this package is installed. It imports nothing else of the package until the fixture is
called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from mock_scheduler.api.compare import Verdict

_OPTION = "--mock-scheduler-html"


class AssertAligned(Protocol):
    """The signature of the fixture: that of ``mock_scheduler.comparison``."""

    def __call__(
        self,
        baseline: str | Path,
        candidate: str | Path,
        *,
        steps: str | None = None,
        kinds: Sequence[str] = (),
        patterns: Sequence[str] = (),
        tolerance: Mapping[str, float] | None = None,
        noise: Sequence[str | Path] = (),
        has_metrics: bool = True,
    ) -> Verdict:
        """Compare, and return the verdict where it passes; else fail the test with the verdict in words."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for a page of every failed comparison."""
    group = parser.getgroup("mock-scheduler")
    group.addoption(_OPTION, metavar="DIR", default=None, help="write a page for every failed assert_aligned here")


@pytest.fixture
def assert_aligned(request: pytest.FixtureRequest) -> AssertAligned:
    """Fail the test unless two runs, traces, metrics or recordings are ``identical`` or within ``rounding``."""
    folder: str | None = request.config.getoption(_OPTION)
    num_failed = 0

    def check(
        baseline: str | Path,
        candidate: str | Path,
        *,
        steps: str | None = None,
        kinds: Sequence[str] = (),
        patterns: Sequence[str] = (),
        tolerance: Mapping[str, float] | None = None,
        noise: Sequence[str | Path] = (),
        has_metrics: bool = True,
    ) -> Verdict:
        # Imported here, so that pytest itself loads no torch.
        from mock_scheduler.api.compare import compare

        nonlocal num_failed
        verdict = compare(
            baseline,
            candidate,
            steps=steps,
            kinds=kinds,
            patterns=patterns,
            tolerance=tolerance,
            noise=noise,
            has_metrics=has_metrics,
        )
        # ``suspect`` and ``unverified`` fail too: a test asks for proof, not for the lack of a difference.
        if verdict.passes:
            return verdict
        page = ""
        if folder is not None:
            name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.nodeid).strip("-")
            path = Path(folder) / f"{name}{f'-{num_failed}' if num_failed else ''}.html"
            verdict.save_html(path)
            page = f"\npage: {path}"
            num_failed += 1
        pytest.fail(f"{verdict.describe()}{page}", pytrace=False)

    return check
