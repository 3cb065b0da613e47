"""A package's version is that of the first of its distributions that is installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from mock_scheduler.support.versions import DISTRIBUTIONS, read_all_versions, read_package_version


def test_the_first_installed_distribution_counts() -> None:
    assert read_package_version("no-such-package") is None
    assert read_package_version("no-such-package", "numpy", "torch") == metadata.version("numpy")


def test_every_package_has_a_distribution() -> None:
    assert all(DISTRIBUTIONS.values())
    assert DISTRIBUTIONS["cublas"] == ("nvidia-cublas", "nvidia-cublas-cu12")


def test_every_installed_distribution_has_the_version_that_python_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one in setuptools' older form, and of one whose description has lines like a header's."""
    old, new = tmp_path / "Old_One.egg-info", tmp_path / "new-2.dist-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: Old.One\nVersion: 3\n")
    new.mkdir()
    (new / "METADATA").write_text("Metadata-Version: 2.1\nName: New\nVersion: 2.0\n\nName: other\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = read_all_versions()
    assert (found["old.one"], found["new"]) == ("3", "2.0")
    assert found == {found.name.lower(): found.version for found in metadata.distributions()}
