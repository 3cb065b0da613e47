"""A training in plain torch is traced at its optimizer; two traces compare, and shards of DTensors lie in place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mock_scheduler.api.compare import compare
from mock_scheduler.api.reading import open_trace
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.plain_torch.state import named_parameters, plain_name, read_state
from mock_scheduler.plain_torch.tracing import trace_training, unwrap_optimizer
from mock_scheduler.trace.shards import place_shard
from mock_scheduler.verdict.verdict import VerdictKind


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def train(trace_dir: Path, *, wrong: float = 0.0, steps: int = 3, **options: Any) -> torch.nn.Module:
    """Train with Adam; ``wrong`` is added to one element of one gradient of step 1."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tracing = trace_training(model, optimizer, trace_dir=trace_dir, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((5, 3), 0.1 * (step + 1))).square().sum().backward()
        if step == 1:
            model[2].weight.grad[1, 2] += wrong
        optimizer.step()
    tracing.close()
    return model


def test_a_trace_holds_parameters_gradients_and_moments_of_each_update(tmp_path: Path) -> None:
    model = train(tmp_path / "a", first_step=5)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == (5, 6, 7)
    names = {key.name for key in trace.keys(6, "parameter")}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert torch.equal(trace.tensor(trace.key(7, "parameter", "2.weight")), model[2].weight)
    assert {key.name for key in trace.keys(6, "optimizer")} == {
        f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")
    }
    assert torch.equal(trace.tensor(trace.key(5, "initial", "0.bias")), build()[0].bias)


def test_equal_trainings_compare_equal_and_a_planted_fault_is_named(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    assert compare(tmp_path / "a", tmp_path / "b").kind is VerdictKind.IDENTICAL
    train(tmp_path / "c", wrong=1e-3)
    verdict = compare(tmp_path / "a", tmp_path / "c")
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind, verdict.first.name) == (1, "gradient", "2.weight")


def test_a_selection_leaves_out_and_one_that_means_nothing_is_refused(tmp_path: Path) -> None:
    chosen = {"level": "full", "kinds": ["gradient"], "patterns": ["2.*"], "steps": [1]}
    train(tmp_path / "a", trace=chosen)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == (1,)
    assert sorted(key.name for key in trace.keys(1)) == ["2.bias", "2.weight"]
    with pytest.raises(
        ConfigError, match=r"trace\.kinds: activation cannot be seen at an optimizer; known are initial"
    ):
        train(tmp_path / "b", trace={"level": "full", "kinds": ["activation"]})
    with pytest.raises(TraceError, match=r"'layers\.\*' selects nothing"):
        train(tmp_path / "c", trace={"level": "full", "kinds": ["gradient"], "patterns": ["layers.*"]})
    assert not list((tmp_path / "c").rglob("*.safetensors"))


def test_gradients_can_be_shown_before_they_are_clipped(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = {"level": "full", "kinds": ["gradient", "gradient_norm"]}
    tracing = trace_training(model, optimizer, trace_dir=tmp_path, trace=trace)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model[0].weight.grad.clone()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    tracing.gradients_are_ready(norm)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    tracing.close()
    found = open_trace(tmp_path)
    assert torch.equal(found.tensor(found.key(0, "gradient", "0.weight")), gradient)
    assert found.tensor(found.key(0, "gradient_norm", "grad_norm")).item() == norm


def test_names_are_without_what_wrappers_add() -> None:
    assert plain_name("module.module.layers.0._orig_mod.mlp._checkpoint_wrapped_module.up.weight") == (
        "layers.0.mlp.up.weight"
    )
    assert plain_name("encoder.module.weight") == "encoder.module.weight"
    flat = torch.nn.Module()
    flat.register_parameter("_flat_param", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(TraceError, match="FSDP1 keeps the parameters of a module in one flat tensor"):
        named_parameters(flat)


class Wrapped:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_wrappers_of_an_optimizer_are_looked_through() -> None:
    inner = torch.optim.SGD(build().parameters())
    assert unwrap_optimizer(Wrapped(Wrapped(inner))) is inner
    with pytest.raises(ConfigError, match=r"the optimizer is a Linear; expected one of torch\.optim"):
        unwrap_optimizer(torch.nn.Linear(1, 1))


def pieces(rank: int, whole: torch.Tensor, placements: list[Any], sizes: tuple[int, ...]) -> list[Any]:
    """What one rank of a mesh reads of a parameter that is a DTensor; torch knows rank 0 alone, and is told another."""
    coordinate = list(map(int, np.unravel_index(rank, sizes)))
    dist.init_process_group("fake", rank=0, world_size=torch.Size(sizes).numel(), store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", sizes)
        local = whole
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                parts = local.chunk(sizes[dim], placement.dim)
                index = coordinate[dim]
                local = parts[index] if index < len(parts) else local.narrow(placement.dim, 0, 0)
        shape, stride = whole.shape, whole.stride()
        tensor = DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(tensor))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMesh, "get_coordinate", lambda _mesh: coordinate)
            return list(read_state(model, None, "parameter"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "sizes"),
    [([Shard(0)], (3,)), ([Shard(1)], (2,)), ([Replicate(), Shard(0)], (2, 2)), ([Shard(1), Shard(0)], (2, 3))],
)
def test_the_shards_of_all_ranks_make_the_whole(placements: list[Any], sizes: tuple[int, ...]) -> None:
    whole = torch.arange(28.0).reshape(4, 7)
    merged = torch.full_like(whole, -1)
    for rank in range(torch.Size(sizes).numel()):
        for spec, local in pieces(rank, whole, placements, sizes):
            assert spec.global_shape == (4, 7)
            place_shard(merged, local, spec)
    assert torch.equal(merged, whole)


def test_a_rank_without_rows_has_no_piece_and_a_sum_that_is_due_is_refused() -> None:
    assert pieces(3, torch.ones(2, 3), [Shard(0)], (4,)) == []
    with pytest.raises(TraceError, match=r"w is a DTensor with placements .*Partial"):
        pieces(0, torch.ones(2, 3), [Partial()], (2,))
