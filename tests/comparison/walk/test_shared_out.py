"""A comparison that is shared out to other processes has every figure, finding and note of one that is not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from mock_scheduler.comparison.pairing.selection import EVERYTHING
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.errors import ConfigError
from mock_scheduler.trace.full import opening
from mock_scheduler.trace.full.part import Part
from mock_scheduler.trace.full.pieces import Shared
from mock_scheduler.verdict.replicas import check_replicas_at
from tests.comparison.walk.test_walk import BOUNDS, LAYER, WEIGHT, Run, changed, make_run, noise

T = TypeVar("T")


class OtherProcesses:
    """As other processes would: tasks and results go through pickle. num_tasks: how many there were."""

    num_tasks = 0

    def __call__(self, tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
        self.num_tasks += len(tasks)
        for task in tasks:
            yield pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task))()))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Three steps; the candidate has another gradient and one tensor more, and its ranks disagree about a copy."""
    run = replace(make_run(), steps=3)
    gradient = run.tensors["gradient", WEIGHT]
    other: Run = run.with_tensor("gradient", WEIGHT, changed(gradient * (1 + 2.0**-20), (3, 2), 0.5))
    other = other.with_tensor("activation", f"{LAYER}.more", noise("more", 3))
    other = replace(other, copies={(1, LAYER): changed(run.tensors["activation", LAYER], (1, 1), 2.0**-10)})
    return run.write(tmp_path / "a"), other.write(tmp_path / "b")


def test_shared_steps_give_what_one_process_gives(pair: tuple[Path, Path]) -> None:
    spread, counts = OtherProcesses(), ([], [])
    results: list[TensorComparison] = [
        compare_trace_folders(
            *pair, bounds=BOUNDS, selection=EVERYTHING, spread=used, on_key=lambda *done, seen=seen: seen.append(done)
        )
        for used, seen in zip((None, spread), counts, strict=True)
    ]
    assert spread.num_tasks == 3
    assert results[0] == results[1]
    assert [item for item in results[1].differences if not item.bit_equal]
    assert len(results[1].candidate_conflicts) == 3
    assert results[1].findings
    assert counts[0][-1] == counts[1][-1]


def test_shared_copies_are_counted_as_one_process_counts_them(pair: tuple[Path, Path]) -> None:
    spread = OtherProcesses()
    alone, shared = (check_replicas_at(pair[1], spread=used) for used in (None, spread))
    assert spread.num_tasks > 1
    assert alone == shared
    assert len(shared.conflicts) == 3


class StepsOfTasks(OtherProcesses):
    """Notes the steps of which each task reads a header."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[set[str]] = []
        read_part = opening.read_part

        def noted(path: Path, trace_dir: Path, *, shared: Shared | None = None) -> Part:
            if self.steps:
                self.steps[-1].add(path.parent.name)
            return read_part(path, trace_dir, shared=shared)

        monkeypatch.setattr(opening, "read_part", noted)

    def __call__(self, tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
        for task in tasks:
            self.steps.append(set())
            yield from super().__call__([task])


def test_a_task_reads_the_headers_of_its_steps_alone(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task had opened the whole trace."""
    spread = StepsOfTasks(monkeypatch)
    compare_trace_folders(*pair, bounds=BOUNDS, spread=spread)
    first, second, third = (f"step_{step:06d}" for step in range(3))
    assert spread.steps == [{first}, {first, second}, {second, third}]
    spread.steps.clear()
    check_replicas_at(pair[1], spread=spread)
    assert max(map(len, spread.steps)) == 1


def test_sketches_are_not_shared_out(tmp_path: Path) -> None:
    folders = (make_run().write(tmp_path / name, is_sketch=True) for name in ("a", "b"))
    with pytest.raises(ConfigError, match="sketches is not shared out"):
        compare_trace_folders(*folders, bounds=BOUNDS, spread=OtherProcesses())
