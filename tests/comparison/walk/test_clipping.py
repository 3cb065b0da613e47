"""The clip is held to the norm by Adam's first moment, in two ranks of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.comparison.findings import Finding, OtherClip
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

WEIGHT, NORM = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"
BETA = 0.9
NUM_UPDATES = 3
Clip = Callable[[float, int, str], float]
"""From a norm, a rank and a parameter to the coefficient."""


def clip_at(threshold: float, **others: float) -> Clip:
    """Megatron's rule; ``others``: factors of one ``rank``, and of the parameter ``norm``."""

    def clip(norm: float, rank: int, name: str) -> float:
        factor = others.get("rank", 1.0) if rank == 1 else 1.0
        factor *= others.get("norm", 1.0) if name == NORM else 1.0
        return factor * min(1.0, threshold / (norm + 1e-6))

    return clip


def gradients_of(scale: float) -> list[Mapping[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {name: scale * torch.randn(shape, generator=generator) for name, shape in ((WEIGHT, (4, 4)), (NORM, (4,)))}
        for _ in range(NUM_UPDATES)
    ]


def write(folder: Path, clip: Clip, *, scale: float = 1.0, beta: float = BETA, num_ranks: int = 2) -> Path:
    """Writes gradients and moments of three updates of a run."""
    for rank in range(num_ranks):
        moments = {WEIGHT: torch.zeros(4, 4), NORM: torch.zeros(4)}
        entries = []
        for update, gradients in enumerate(gradients_of(scale)):
            norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
            for name, value in gradients.items():
                moments[name] = beta * moments[name] + (1 - beta) * clip(norm, rank, name) * value
                pairs: tuple[tuple[TraceKind, str, torch.Tensor], ...] = (
                    ("gradient", name, value),
                    ("optimizer", f"{name}.exp_avg", moments[name]),
                )
                for kind, traced, tensor in pairs:
                    splits = even_split(0, size=4, rank=rank, num_ranks=num_ranks) if name == WEIGHT else ()
                    local = (4 // num_ranks, 4) if name == WEIGHT else (4,)
                    spec = ShardSpec(name=traced, global_shape=tuple(value.shape), local_shape=local, splits=splits)
                    entries.append(TraceEntry(update=update, kind=kind, spec=spec, tensor=cut_shard(tensor, spec)))
        save_rank_trace(
            folder, step=0, global_rank=rank, world_size=num_ranks, coordinates={"tp": rank}, entries=entries
        )
    return folder


RIGHT = clip_at(0.5)


def find(tmp_path: Path, candidate: Clip, baseline: Clip = RIGHT, **of: Any) -> list[Finding]:
    folders = write(tmp_path / "a", baseline, num_ranks=1), write(tmp_path / "b", candidate, **of)
    found = compare_trace_folders(*folders, bounds=stated()).findings
    return [item for item in found if isinstance(item.fact, OtherClip)]


@pytest.mark.parametrize("of", [{}, {"scale": 1.25}, {"scale": 0.05}, {"beta": 0.8}])
def test_one_threshold_is_no_finding_whatever_the_gradients(tmp_path: Path, of: Mapping[str, float]) -> None:
    """Scaled gradients have another norm and are clipped by it, or not at all; another beta is another optimizer."""
    assert find(tmp_path, clip_at(0.5), **of) == []


def test_another_threshold_is_named_with_its_factor(tmp_path: Path) -> None:
    found = find(tmp_path, clip_at(0.55))
    assert [(item.kind, item.name, item.update) for item in found] == [
        ("gradient_norm", "clip", update) for update in range(NUM_UPDATES)
    ]
    assert isinstance(found[1].fact, OtherClip)
    assert found[1].fact.factor == pytest.approx(1.1, rel=1e-5)
    assert describe_finding(found[0]) == (
        "clip of the gradients at step 0, update 0 is not that of their norm in the candidate: by the moments, the "
        "coefficient is 1.1 times what the baseline's clip makes of such a norm"
    )


def test_a_clip_where_there_is_none_to_be_is_found(tmp_path: Path) -> None:
    found = find(tmp_path, clip_at(0.5), baseline=clip_at(100.0))
    assert len(found) == NUM_UPDATES


def test_a_rank_with_a_coefficient_of_its_own_is_named(tmp_path: Path) -> None:
    first, *_ = find(tmp_path, clip_at(0.5, rank=0.9))
    assert isinstance(first.fact, OtherClip)
    assert (first.update, first.fact.place, first.fact.than) == (0, "tp1", "tp0")
    assert first.fact.factor == pytest.approx(0.9, rel=1e-5)
    assert describe_finding(first).endswith(
        "has no one coefficient in the candidate: by the moments, the ranks at tp1 multiply by 0.9 times what those at "
        "tp0 do"
    )


def test_a_parameter_that_was_not_clipped_with_the_others_is_named(tmp_path: Path) -> None:
    first, *_ = find(tmp_path, clip_at(0.5, norm=2.0))
    assert isinstance(first.fact, OtherClip)
    assert (first.fact.place, first.fact.names) == ("", (NORM,))
    assert first.fact.factor == pytest.approx(2.0, rel=1e-5)


def test_a_baseline_that_keeps_no_law_is_no_measure(tmp_path: Path) -> None:
    assert find(tmp_path, clip_at(0.6), baseline=clip_at(0.5, norm=2.0)) == []
