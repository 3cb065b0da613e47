"""Gradients that vime and Megatron saved become traces that are compared across layouts, and name what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler import compare, open_trace
from mock_scheduler.commands.foreign import ImportCommand, run_import
from mock_scheduler.errors import ForeignFileError, MockSchedulerError, TraceError
from mock_scheduler.support.foreign_files import load_json
from tests.adapters.imports.forging import Described, Global, torch_bytes
from tests.adapters.imports.importing import write

FC1 = torch.arange(24, dtype=torch.float32).reshape(8, 3)
QKV = torch.arange(12, dtype=torch.float32).reshape(4, 3) + 0.5
NORM = torch.tensor([1.0, 2.0, 3.0])


def record(
    local: torch.Tensor, start: int, stop: int, *, tp: tuple[int, int] = (0, 1), glu: bool = False
) -> dict[str, Any]:
    """A parameter as vime saves it."""
    return {
        "shape": tuple(local.shape),
        "start": start,
        "grad": local.reshape(-1)[start:stop].clone(),
        "tp_rank": tp[0],
        "tp_size": tp[1],
        "partition_dim": 0,
        "partition_stride": 1,
        "glu": glu,
    }


def save(folder: Path, rank: int, world_size: int, tensors: dict[str, Any], *, step: int = 0) -> None:
    named = {f"module.module.decoder.layers.0.{name}.weight": value for name, value in tensors.items()}
    content = {"version": 1, "rank": rank, "world_size": world_size, "tensors": named}
    write(folder / f"rollout-3/step-{step}/rank-{rank}.pt", torch_bytes(content))


def save_one_rank(folder: Path, *, norm: torch.Tensor = NORM) -> Path:
    tensors = {"mlp.linear_fc1": record(FC1, 0, 24, glu=True), "qkv": record(QKV, 0, 12), "norm": record(norm, 0, 3)}
    for step in range(2):
        save(folder, 0, 1, tensors, step=step)
    return folder


def save_two_by_two(folder: Path) -> Path:
    """tp 2 and dp 2 with a distributed optimizer: each rank owns a part of its shards."""
    for tp in range(2):
        gated = torch.cat([FC1[2 * tp : 2 * tp + 2], FC1[4 + 2 * tp : 6 + 2 * tp]])
        for dp in range(2):
            tensors = {
                "mlp.linear_fc1": record(gated, 7 * dp, (7, 12)[dp], tp=(tp, 2), glu=True),
                "qkv": record(QKV[2 * tp : 2 * tp + 2], 6 * dp, 6, tp=(tp, 2)),  # the second owns nothing
                "norm": record(NORM, dp, (1, 3)[dp]),
            }
            for step in range(2):
                save(folder, 2 * tp + dp, 4, tensors, step=step)
    return folder


def imported(name: str, source: Path) -> Path:
    folder = source.parent / f"trace of {source.name}"
    told = source.parent / "told.json"
    assert run_import(name, source, folder, ImportCommand(json_path=str(told))) == 0
    for below, steps in load_json(told)["traces"].items():
        with open_trace(folder / below) as trace:
            assert list(trace.steps) == steps
    return folder


def test_gradients_of_two_layouts_are_the_same(tmp_path: Path) -> None:
    one = imported("vime-gradients", save_one_rank(tmp_path / "one"))
    four = imported("vime-gradients", save_two_by_two(tmp_path / "four"))
    with open_trace(four) as trace:
        found = {key.name: trace.tensor(key) for key in trace.keys(3, "gradient") if key.update == 1}
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "decoder.layers.0.mlp.linear_fc1.weight": FC1.tolist(),
        "decoder.layers.0.qkv.weight": QKV.tolist(),
        "decoder.layers.0.norm.weight": NORM.tolist(),
    }
    assert compare(one, four).passes


def test_a_changed_gradient_is_named(tmp_path: Path) -> None:
    one = imported("vime-gradients", save_one_rank(tmp_path / "one"))
    other = imported("vime-gradients", save_one_rank(tmp_path / "other", norm=torch.tensor([1.0, 2.0, 3.5])))
    verdict = compare(one, other)
    assert not verdict.passes
    assert "decoder.layers.0.norm.weight" in str(verdict)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "with a gradient that does not fit"),
        ({"start": -1}, "with a gradient that does not fit"),
        ({"grad": torch.zeros(2, 2)}, "with a gradient that does not fit"),
        ({"tp_size": 2, "glu": False, "partition_stride": 2}, "has a partition stride of 2"),
        ({"tp_size": 2, "glu": True, "partition_dim": 1}, "is a gated layer split along dimension 1"),
        ({"start": 20}, "module"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    save(tmp_path / "actor", 0, 1, {"fc1": {**record(FC1, 0, 24), **change}})
    with pytest.raises(MockSchedulerError, match=problem if problem != "module" else "decoder.layers.0.fc1.weight"):
        imported("vime-gradients", tmp_path / "actor")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor"]


def test_saved_gradients_of_megatron_are_compared_in_one_layout(tmp_path: Path) -> None:
    for run, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        content = {"model_chunk0": {"module.decoder.final_layernorm.weight": torch.full((3,), value)}}
        write(tmp_path / run / "wgrads/iter_0000004/mp_rank_00_001.pth", torch_bytes(content))
    first, same, other = (imported("megatron-saved", tmp_path / run) for run in "abc")
    assert compare(first, same).passes
    verdict = compare(first, other)
    assert not verdict.passes
    assert "mp_rank_00_001.model_chunk0.decoder.final_layernorm.weight" in str(verdict)


def test_saved_parameters_of_megatron_are_compared_without_those_before(tmp_path: Path) -> None:
    for run, value in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        content = {"model_chunk0": {"module.decoder.final_layernorm.weight": torch.full((3,), value)}}
        write(tmp_path / run / "params/iter_0000004/mp_rank_00.pth", torch_bytes(content))
    first, same, other = (imported("megatron-saved", tmp_path / run) for run in "abc")
    assert compare(first, same).passes
    verdict = compare(first, other)
    assert not verdict.passes
    assert "mp_rank_00.model_chunk0.decoder.final_layernorm.weight" in str(verdict)


def test_a_hostile_snapshot_runs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "actor/rollout-0/step-0/rank-0.pt", torch_bytes({"x": Described(Global("os", "system"), "true")}))
    with pytest.raises(ForeignFileError, match=r"names 'os\.system'"):
        imported("vime-gradients", tmp_path / "actor")


@pytest.mark.parametrize("world_size", [2, 200_000_000])
def test_ranks_without_files_are_refused(tmp_path: Path, world_size: int) -> None:
    save(tmp_path / "actor", 0, world_size, {"fc1": record(FC1, 0, 24)})
    problem = f"rollout 3 is of {world_size} ranks, and 1 of them have files: put the files of all ranks there"
    with pytest.raises(TraceError, match=problem):
        imported("vime-gradients", tmp_path / "actor")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor"]
