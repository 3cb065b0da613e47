"""What each adapter says about its framework, and which of these frameworks are installed here.

Contract: an adapter's folder with a module ``framework`` that has a ``FRAMEWORK`` is found; nothing of a framework is
imported. A version that the adapter was not tried with is named, never refused: only a run can tell.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import mock_scheduler.adapters
from mock_scheduler.support.digests import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """An adapter's declaration.

    ``distribution``: as pip names the framework; None where it is installed from its sources alone. ``tried``: versions
    with which its real package was run here; ``tried_parts``: revisions of which only some parts were, and which.
    ``needs``: further distributions that the adapter's examples need.
    ``seam``: where the proxy stands; ``suppressed``: what does not start in a replay; ``page``: in ``docs``.
    """

    name: str
    distribution: str | None
    tried: tuple[str, ...]
    tried_parts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seam: str
    suppressed: str
    page: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkState:
    """A framework as it is here; ``installed``: its version, None where it is not; ``missing``: of what it needs."""

    framework: Framework
    installed: str | None
    missing: tuple[str, ...]

    @property
    def status(self) -> str:
        """One phrase: whether it can be used, and else what to do."""
        framework = self.framework
        if self.installed is None:
            if framework.distribution is None:
                return "used from its sources: see its page"
            wanted = f"=={framework.tried[-1]}" if framework.tried else ""
            return f"not installed: pip install {framework.distribution}{wanted}"
        if self.missing:
            return f"needs {', '.join(self.missing)}"
        return "tried" if self.installed in framework.tried else "installed in a version that was not tried"

    def as_json(self) -> dict[str, JSON]:
        """The declaration and the state, by name."""
        framework = self.framework
        return {
            "name": framework.name,
            "distribution": framework.distribution,
            "installed": self.installed,
            "tried": list(framework.tried),
            "tried_parts": list(framework.tried_parts),
            "missing": list(self.missing),
            "status": self.status,
            "seam": framework.seam,
            "suppressed": framework.suppressed,
            "page": framework.page,
        }


def find_frameworks() -> list[Framework]:
    """Find the declarations of all adapters, by name."""
    found: list[Framework] = []
    for module in pkgutil.iter_modules(mock_scheduler.adapters.__path__):
        if module.ispkg and _has_declaration(module.name):
            found.append(import_module(f"{mock_scheduler.adapters.__name__}.{module.name}.framework").FRAMEWORK)
    return sorted(found, key=lambda framework: framework.name.lower())


def look_around(frameworks: Sequence[Framework]) -> list[FrameworkState]:
    """Say of each framework which version of it is installed here, and what is missing."""
    return [
        FrameworkState(
            framework=framework,
            installed=None if framework.distribution is None else find_version(framework.distribution),
            missing=tuple(name for name in framework.needs if find_version(name) is None),
        )
        for framework in frameworks
    ]


def find_version(distribution: str) -> str | None:
    """Read the installed version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _has_declaration(folder: str) -> bool:
    paths = [f"{path}/{folder}" for path in mock_scheduler.adapters.__path__]
    return any(module.name == "framework" for module in pkgutil.iter_modules(paths))
