"""Corrected steps of real models: the same weights, kept tokens and metrics in every layout and every batching."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import launch
from tests.dist.workers.correction_worker import CORRECTIONS

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for the launches

REFERENCE = "tp1/plain"
CORRECTED = [name for name in CORRECTIONS if name not in ("off", "gmpo")]
BATCHED, PACKED, TURNS = "tp1/micro-batch-4", "tp1/packing", "tp1/turns+micro-batch-8"
# By correction: each way of several processes is there, and each correction under context parallelism.
SHARED = (
    *("decoupled/tp2/micro-batch-4", "decoupled/cp2/micro-batch-4", "segment-kept/cp2/micro-batch-4"),
    *("bypass/cp2/micro-batch-4", "bypass/pp2/micro-batch-4", "ratio/dp2/packing"),
    "gmpo/pp2/micro-batch-4",  # GMPO takes every sequence as one line
)
ALONE = (f"decoupled/{BATCHED}", f"bypass/{PACKED}")
LONG_ALONE = (BATCHED, PACKED)
LONG_SHARED = ("tp2/plain", "pp2/micro-batch-4", "cp2/plain", "dp2/packing")
LONG = ("tp2-sp-pp2/plain", "pp2-dp2/dynamic", "tp2-cp2/micro-batch-4", "cp2-dp2/packing")


def tasks_of(ways: tuple[str, ...], corrections: list[str] = CORRECTED) -> tuple[str, ...]:
    return tuple(f"{correction}/{way}" for correction in corrections for way in ways)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrected")
    references = tasks_of((REFERENCE,), [*CORRECTIONS])
    launch(1, folder, (*references, *ALONE, *tasks_of((TURNS,))), module="tests.dist.workers.correction_worker")
    launch(2, folder, SHARED, module="tests.dist.workers.correction_worker")
    return folder


def read(root: Path, task: str) -> dict[str, Any]:
    """Metrics, and the values of all ranks together; those that ranks hold alike must be alike."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / task).glob("*.json"))]
    values: dict[str, dict[str, float]] = {}
    for part in parts:
        assert part["metrics"] == parts[0]["metrics"]
        for name, table in part["values"].items():
            whole = values.setdefault(name, {})
            for place, value in table.items():
                assert whole.setdefault(place, value) == value, (task, name, place)
    return {"metrics": parts[0]["metrics"], "values": values}


def assert_same(root: Path, correction: str, way: str) -> None:
    reference, found = read(root, f"{correction}/{REFERENCE}"), read(root, f"{correction}/{way}")
    # Metrics of padding and micro-batches are not the correction's.
    assert found["metrics"].keys() == reference["metrics"].keys()
    for name, value in reference["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert found["values"].keys() == reference["values"].keys()
    for name, table in reference["values"].items():
        if name.endswith("/kept"):
            assert found["values"][name] == table, name
        else:
            assert found["values"][name] == pytest.approx(table, rel=1e-11), name


@pytest.mark.parametrize("task", [*ALONE, *SHARED])
def test_every_layout_and_batching_trains_with_the_same_correction(root: Path, task: str) -> None:
    correction, way = task.split("/", 1)
    assert_same(root, correction, way)


@pytest.mark.parametrize("correction", CORRECTED)
def test_a_row_of_every_turn_has_the_metrics_of_a_row_of_the_whole_trajectory(root: Path, correction: str) -> None:
    reference = read(root, f"{correction}/{REFERENCE}")["metrics"]
    turns = read(root, f"{correction}/{TURNS}")["metrics"]
    names = [name for name in reference if name.startswith(("rollout_corr/", "mismatch/")) and "by_lag" not in name]
    assert len(names) > 30
    for name in names:
        assert turns[name] == pytest.approx(reference[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("correction", CORRECTED)
def test_some_tokens_are_kept_and_some_rejected(root: Path, correction: str) -> None:
    metrics = read(root, f"{correction}/{REFERENCE}")["metrics"]
    assert 0.1 < metrics["rollout_corr/kept_fraction"] < 0.95
    uncorrected = read(root, f"off/{REFERENCE}")["metrics"]
    assert not any(name.startswith("rollout_corr/") for name in uncorrected)
    assert abs(metrics["pg_loss"] - uncorrected["pg_loss"]) > 1e-4


def test_bypass_follows_the_policy_from_update_to_update(root: Path) -> None:
    values = read(root, f"bypass/{REFERENCE}")["values"]
    weights = {name: table for name, table in values.items() if name.endswith("/weights")}
    assert len(weights) == 4  # two updates in each of two epochs
    first, again = weights["loss/0/weights"], weights["loss/2/weights"]
    assert first.keys() == again.keys()
    assert any(abs(first[place] - again[place]) > 1e-6 for place in first)


@pytest.mark.all
def test_every_correction_is_the_same_in_all_ways_of_one_two_and_four_processes(tmp_path: Path) -> None:
    launch(1, tmp_path, tasks_of((REFERENCE, *LONG_ALONE)), module="tests.dist.workers.correction_worker")
    launch(2, tmp_path, tasks_of(LONG_SHARED), module="tests.dist.workers.correction_worker")
    launch(4, tmp_path, tasks_of(LONG), module="tests.dist.workers.correction_worker")
    for correction in CORRECTED:
        for way in (*LONG_ALONE, *LONG_SHARED, *LONG):
            assert_same(tmp_path, correction, way)
