"""Seeds by name: fixed values, whatever the process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from pipelines.environments.seeds import derive_seed, derive_uniform


def test_values_are_fixed_for_ever() -> None:
    """A recording run's episodes depend on these: another derivation is another experiment."""
    assert derive_seed(42, "environment", "FrozenLake", "train", "default", 0, 0) == 1867578351
    assert derive_uniform(42, "sampling", "train", "default", 0, 0, 0, 0) == 0.6573787450641897


def test_both_are_the_first_bits_of_a_sha256_of_the_name() -> None:
    digest = hashlib.sha256(b"7/a/1").digest()
    assert derive_seed(7, "a", 1) == int.from_bytes(digest[:4], "little") // 2
    assert derive_uniform(7, "a", 1) == (int.from_bytes(digest[:8], "little") // 2**11) / 2**53


def test_every_part_of_the_name_counts() -> None:
    names = [(1, "a", 2), (2, "a", 2), (1, "b", 2), (1, "a", 3), (1, "a")]
    assert len({derive_seed(*name) for name in names}) == 5
    assert len({derive_uniform(*name) for name in names}) == 5


def test_ranges_are_kept_and_filled() -> None:
    uniforms = [derive_uniform(0, "u", index) for index in range(4000)]
    assert 0.0 <= min(uniforms) < 0.001
    assert 0.999 < max(uniforms) < 1.0
    # The mean of 4,000 uniform numbers has a standard deviation of 1 / sqrt(12 · 4000) = 0.0046.
    assert sum(uniforms) / 4000 == pytest.approx(0.5, abs=0.02)
    assert all(0 <= derive_seed(0, "s", index) < 2**31 for index in range(1000))


def test_the_hash_seed_changes_nothing() -> None:
    code = (
        "from pipelines.environments.seeds import derive_seed, derive_uniform; "
        "print(derive_seed(3, 'x'), derive_uniform(3, 'x'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{derive_seed(3, 'x')} {derive_uniform(3, 'x')}\n"}
