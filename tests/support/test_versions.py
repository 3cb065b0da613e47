"""A package's version is that of the first of its distributions that is installed."""

from __future__ import annotations

from importlib import metadata

from mock_scheduler.support.versions import DISTRIBUTIONS, read_package_version


def test_the_first_installed_distribution_counts() -> None:
    assert read_package_version("no-such-package") is None
    assert read_package_version("no-such-package", "numpy", "torch") == metadata.version("numpy")


def test_every_package_has_a_distribution() -> None:
    assert all(DISTRIBUTIONS.values())
    assert DISTRIBUTIONS["cublas"] == ("nvidia-cublas", "nvidia-cublas-cu12")
