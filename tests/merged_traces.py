"""Traces of tests as whole tensors, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, open_trace

Merged = Mapping[TraceKey, MergedTensor]


def merge_step(folder: Path) -> Merged:
    """Every tensor of step 0, put together from all ranks, whose replicas must agree to the bit."""
    with open_trace(folder) as trace:
        merged = {key: trace.merge(key) for key in sorted(trace.keys(0), key=str)}
    assert [conflict.describe() for item in merged.values() for conflict in item.conflicts] == []
    return merged


def tensor_of(merged: Merged, kind: str, name: str, *, update: int = 0) -> torch.Tensor:
    """One whole tensor."""
    return next(item.tensor for key, item in merged.items() if (key.kind, key.name, key.update) == (kind, name, update))


def distances(found: Merged, expected: Merged) -> dict[TraceKey, float]:
    """Relative Frobenius distance of every tensor; both must have the same tensors, of one form and with one gap."""
    assert found.keys() == expected.keys()
    result: dict[TraceKey, float] = {}
    for key, one in found.items():
        other = expected[key]
        assert (one.dims, one.tensor.dtype, one.tensor.shape) == (other.dims, other.tensor.dtype, other.tensor.shape)
        assert torch.equal(presence(one), presence(other)), key.describe()
        difference = float((one.tensor.double() - other.tensor.double()).norm())
        result[key] = difference / max(float(other.tensor.double().norm()), 1e-30)
    return result


def presence(item: MergedTensor) -> torch.Tensor:
    """bool: where there is a value."""
    return torch.ones(1, dtype=torch.bool) if item.present is None else item.present


def different_bits(found: Merged, expected: Merged, *, update: int | None = None) -> list[str]:
    """What is not the same to the bit, of one update or all; both must have the same tensors."""
    assert found.keys() == expected.keys()
    return [
        key.describe()
        for key in found
        if update in (None, key.update)
        and not torch.equal(found[key].tensor.view(torch.uint8), expected[key].tensor.view(torch.uint8))
    ]
