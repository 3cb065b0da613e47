"""The norm of gradients is held to the gradients of the candidate itself, in two ranks of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.findings import Finding, NormCount, OtherNorm
from mock_scheduler.comparison.walk.metrics import MetricLog
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split, whole
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

#: Of squares 400 (200 on each rank), 9 and 25.
WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
FIRST_NORM, LAST_NORM = "decoder.layers.0.input_layernorm.weight", "decoder.final_layernorm.weight"
GRADIENTS: Mapping[str, torch.Tensor] = {
    WEIGHT: torch.full((4, 4), 5.0),
    FIRST_NORM: torch.tensor([3.0, 0.0]),
    LAST_NORM: torch.tensor([0.0, 5.0]),
}
NORM = math.sqrt(434.0)


def write(
    folder: Path, *, num_ranks: int, norms: tuple[float, ...] = (), gradients: Mapping[str, torch.Tensor] = GRADIENTS
) -> Path:
    """Writes a trace; ``norms``: of each update, as a run states them."""
    for rank in range(num_ranks):
        entries = []
        for update in range(len(norms) or 1):
            for name, value in gradients.items():
                is_split = name == WEIGHT
                splits = even_split(0, size=len(value), rank=rank, num_ranks=num_ranks) if is_split else ()
                local = (len(value) // num_ranks, *value.shape[1:]) if is_split else tuple(value.shape)
                spec = ShardSpec(name=name, global_shape=tuple(value.shape), local_shape=local, splits=splits)
                entries.append(TraceEntry(update=update, kind="gradient", spec=spec, tensor=cut_shard(value, spec)))
            if norms:
                number = torch.tensor(norms[update], dtype=torch.float64)
                entries.append(
                    TraceEntry(update=update, kind="gradient_norm", spec=whole("grad_norm", ()), tensor=number)
                )
        save_rank_trace(
            folder, step=0, global_rank=rank, world_size=num_ranks, coordinates={"tp": rank}, entries=entries
        )
    return folder


def find(tmp_path: Path, stated_norm: float, *, baseline: float = NORM, logs: bool = False) -> list[Finding]:
    """Compares one rank with two, whose norm is this, as a traced one or as a metric."""
    traced = () if logs else (baseline,), () if logs else (stated_norm,)
    folders = [
        write(tmp_path / name, num_ranks=number, norms=norms)
        for name, number, norms in zip(("one", "two"), (1, 2), traced, strict=True)
    ]
    metrics: tuple[MetricLog, MetricLog] = ({0: {"grad_norm": baseline}}, {0: {"grad_norm": stated_norm}})
    found = compare_trace_folders(*folders, bounds=stated(), logs=metrics if logs else None)
    return [item for item in found.findings if isinstance(item.fact, OtherNorm)]


@pytest.mark.parametrize("logs", [False, True])
def test_the_norm_of_its_own_gradients_is_no_finding(tmp_path: Path, logs: bool) -> None:
    # Its rounding in float32 included.
    assert find(tmp_path, float(torch.tensor(NORM).float()) * (1 + 1e-6), logs=logs) == []


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize(
    ("square", "count"),
    [
        (434 + 9 + 25, NormCount(form="copies", place="tp")),
        (434 + 9, NormCount(form="copies", place="tp", names=("decoder.layers.*.input_layernorm.weight",))),
        (200 + 9 + 25, NormCount(form="part", place="tp0")),
        (434 - 25, NormCount(form="without", names=(LAST_NORM,))),
        (434 * 1.01, None),
    ],
)
def test_a_norm_of_other_squares_is_found_and_explained(
    tmp_path: Path, square: float, count: NormCount | None, logs: bool
) -> None:
    (found,) = find(tmp_path, math.sqrt(square), logs=logs)
    assert (found.kind, found.update) == (("metric", None) if logs else ("gradient_norm", 0))
    assert isinstance(found.fact, OtherNorm)
    assert found.fact.count == count
    assert found.fact.made == pytest.approx(NORM, rel=1e-12)


def test_the_sentence_has_both_norms_and_the_mistake(tmp_path: Path) -> None:
    (found,) = find(tmp_path, math.sqrt(434 + 9), logs=True)
    assert describe_finding(found) == (
        "metric grad_norm at step 0 is 21.04757 in the candidate, whose own gradients have the norm 20.83267 (1.01032 "
        "times it); the baseline's is the norm of its gradients. It counts decoder.layers.*.input_layernorm.weight "
        "once for each of the tp ranks"
    )


def test_a_norm_that_is_another_figure_in_both_says_nothing(tmp_path: Path) -> None:
    """A training that states the norm of scaled gradients, or 0 where it clips nothing."""
    assert find(tmp_path / "scaled", 1024 * NORM, baseline=512 * NORM) == []
    assert find(tmp_path / "none", 1024 * NORM, baseline=0.0) == []


def test_a_gradient_that_was_not_compared_leaves_the_norm_unjudged(tmp_path: Path) -> None:
    less = {name: value for name, value in GRADIENTS.items() if name != LAST_NORM}
    one = write(tmp_path / "one", num_ranks=1, norms=(NORM,))
    two = write(tmp_path / "two", num_ranks=2, norms=(30.0,), gradients=less)
    found = compare_trace_folders(one, two, bounds=stated())
    assert not any(isinstance(item.fact, OtherNorm) for item in found.findings)
