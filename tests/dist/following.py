"""Puts the results of the ranks of ``follow_worker`` together, and compares those of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.trace.shards import ShardSpec, place_shard


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote, in order."""
    paths = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=False) for path in paths]


def merged(ranks: list[Mapping[str, tuple[ShardSpec, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The whole tensors by name; copies must be equal."""
    found: dict[str, torch.Tensor] = {}
    for of_rank in ranks:
        for name, (spec, local) in of_rank.items():
            whole = found.setdefault(name, torch.full(spec.global_shape, torch.nan, dtype=local.dtype))
            before = whole.clone()
            place_shard(whole, local, spec)
            is_new = before.isnan()
            assert torch.equal(whole[~is_new], before[~is_new]), f"copies of {name} differ"
    return found


def differences(one: Path, other: Path) -> Iterator[str]:
    """Names everything that is not the same to the bit in both runs."""
    left, right = read_ranks(one), read_ranks(other)
    for update in range(len(left[0]["updates"])):
        of_left, of_right = ([rank["updates"][update] for rank in ranks] for ranks in (left, right))
        norms = {rank["norm"] for rank in (*of_left, *of_right)}
        if len(norms) > 1:
            yield f"norm of update {update}"
        losses = [
            {number: values for rank in ranks for number, values in rank["losses"].items()}
            for ranks in (of_left, of_right)
        ]
        assert losses[0].keys() == losses[1].keys() == {0, 1, 2, 3}
        yield from (
            f"loss of micro-batch {number} of update {update}"
            for number, values in losses[0].items()
            if not torch.equal(values, losses[1][number])
        )
        for kind in ("gradients", "parameters"):
            tensors, others = (merged([rank[kind] for rank in ranks]) for ranks in (of_left, of_right))
            assert tensors.keys() == others.keys()
            yield from (
                f"{kind} of {name} of update {update}"
                for name, tensor in tensors.items()
                if not torch.equal(tensor, others[name])
            )
