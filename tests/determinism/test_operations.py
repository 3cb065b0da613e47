"""The operation log: what it writes of a step, and that writing it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.determinism.operations import (
    OperationLog,
    OperationLogHeader,
    OperationRecord,
    Phase,
    find_operation_logs,
    operation_log_path,
)
from mock_scheduler.determinism.operations.recorder import record_operations
from mock_scheduler.determinism.operations.writer import as_hex, device_digest, host_digest
from mock_scheduler.errors import TraceError

HEADER = OperationLogHeader(step=0, global_rank=0, world_size=1, settings={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def records_of(folder: Path) -> list[OperationRecord]:
    """All records of the one log in a folder."""
    return list(find_operation_logs(folder)[0][0].records())


def operators_of(records: list[OperationRecord]) -> list[str]:
    return [record.operator for record in records]


def test_every_operation_is_written_with_phase_module_node_and_line(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    inputs = torch.arange(12.0).reshape(4, 3)
    with record_operations(tmp_path, HEADER, modules={"policy": model}):
        model(inputs).sum().backward()
    computed = {
        (record.operator, record.phase, record.module, record.node)
        for record in records_of(tmp_path)
        if record.num_digests
    }
    assert computed == {
        ("aten.addmm.default", Phase.FORWARD, "policy.0", ""),
        ("aten.tanh.default", Phase.FORWARD, "policy.1", ""),
        ("aten.sum.default", Phase.OUTSIDE, "", ""),
        ("aten.ones_like.default", Phase.OUTSIDE, "", ""),
        ("aten.tanh_backward.default", Phase.BACKWARD, "policy.1", "TanhBackward0"),
        ("aten.mm.default", Phase.BACKWARD, "policy.0", "AddmmBackward0"),
        ("aten.sum.dim_IntList", Phase.BACKWARD, "policy.0", "AddmmBackward0"),
    }
    accumulated = [record for record in records_of(tmp_path) if record.node.startswith("AccumulateGrad")]
    assert {(record.module, record.node) for record in accumulated} == {
        ("policy.0", "AccumulateGrad of weight"),
        ("policy.0", "AccumulateGrad of bias"),
    }
    line = next(record.place for record in records_of(tmp_path) if record.operator == "aten.addmm.default")
    assert line.startswith("tests/determinism/test_operations.py:")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_is_told_from_the_first(tmp_path: Path, use_reentrant: bool) -> None:
    """Without reentrance the recomputation ends by an exception as soon as nothing more is needed."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    inputs = torch.ones(1, 2, requires_grad=True)
    with record_operations(tmp_path, HEADER, modules={"policy": model}):
        torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=use_reentrant).sum().backward()
        inputs.exp()
    found = [(record.phase, record.module) for record in records_of(tmp_path) if record.operator == "aten.tanh.default"]
    assert found == [(Phase.FORWARD, "policy.1"), (Phase.RECOMPUTATION, "policy.1")]
    found = [(record.phase, record.module) for record in records_of(tmp_path) if record.node == "TanhBackward0"]
    assert set(found) == {(Phase.BACKWARD, "policy.1")}
    found = [(record.phase, record.module) for record in records_of(tmp_path) if record.operator == "aten.exp.default"]
    assert found == [(Phase.OUTSIDE, "")]


def test_what_was_written_in_place_is_digested_before_and_after(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    with record_operations(tmp_path, HEADER, modules={}):
        tensor.mul_(2.0)
    (record,) = records_of(tmp_path)
    assert [(each.name, each.digest) for each in record.inputs] == [("self", host_digest(torch.ones(3)))]
    assert [(each.name, each.digest) for each in record.outputs] == [("self", host_digest(torch.full((3,), 2.0)))]
    assert record.inputs[0].storage == record.outputs[0].storage


def test_what_holds_no_meaning_has_no_digest(tmp_path: Path) -> None:
    """Memory that nothing has written yet, and views, would differ without any consequence."""
    with record_operations(tmp_path, HEADER, modules={}):
        torch.empty(3).fill_(1.0).view(3, 1)
    empty, fill, view = records_of(tmp_path)
    assert [(each.digest, each.note) for each in empty.outputs] == [(None, "uninitialised")]
    assert fill.inputs == ()
    assert [each.digest for each in fill.outputs] == [host_digest(torch.ones(3))]
    assert [(each.digest, each.note) for each in view.outputs] == [(None, "view")]
    assert {each.storage for each in (*empty.outputs, *fill.outputs, *view.outputs)} == {0}


@pytest.mark.parametrize(("beta", "num_inputs"), [(0.0, 2), (1.0, 3)])
def test_what_a_zero_factor_ignores_is_no_input(tmp_path: Path, beta: float, num_inputs: int) -> None:
    """Attention gives baddbmm unwritten memory with beta 0; its bits were named as the first difference of two runs."""
    buffer, left, right = torch.full((1, 2, 2), 7.0), torch.ones(1, 2, 3), torch.ones(1, 3, 2)
    with record_operations(tmp_path, HEADER, modules={}):
        torch.baddbmm(buffer, left, right, beta=beta)
    (record,) = (record for record in records_of(tmp_path) if record.operator == "aten.baddbmm.default")
    assert (len(record.inputs), len(record.outputs)) == (num_inputs, 1)


def test_what_is_returned_as_a_number_is_written(tmp_path: Path) -> None:
    with record_operations(tmp_path, HEADER, modules={}):
        torch.full((), 0.1, dtype=torch.float64).item()
    assert records_of(tmp_path)[-1].values == ("0.1",)


def test_communications_are_written_with_their_group_and_results(tmp_path: Path, gloo: None) -> None:
    tensor = torch.ones(3)
    with record_operations(tmp_path, HEADER, modules={}):
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.mul(2.0)
    records = records_of(tmp_path)
    assert operators_of(records) == ["c10d.allreduce_.default"] * 3 + ["aten.mul.Tensor"]
    assert [record.group for record in records] == [(0,), (0,), (0,), None]
    ones = host_digest(torch.ones(3))
    assert [[each.digest for each in record.outputs] for record in records[:3]] == [[ones], [], [ones]]
    assert [record.completes for record in records] == [None, None, 1, None]


def test_results_of_an_asynchronous_communication_are_read_at_their_first_use_only(tmp_path: Path, gloo: None) -> None:
    """Another part of the same memory may be used while the communication runs."""
    buffer = torch.ones(4)
    with record_operations(tmp_path, HEADER, modules={}):
        work = dist.all_reduce(buffer[:2], async_op=True)
        buffer[2:].mul_(2.0)
        work.wait()
        buffer[:1].mul_(3.0)
    done = [(record.operator, record.completes is not None) for record in records_of(tmp_path) if record.num_digests]
    assert done == [
        ("c10d.allreduce_.default", False),
        ("aten.mul_.Tensor", False),
        ("c10d.allreduce_.default", True),
        ("aten.mul_.Tensor", False),
    ]


def test_recording_changes_no_bit_and_no_random_state(tmp_path: Path) -> None:
    def train() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.LayerNorm(7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 5)).pow(2).sum().backward()
            optimizer.step()
        return (*model.parameters(), torch.get_rng_state())

    plain = train()
    with record_operations(tmp_path, HEADER, modules={}):
        recorded = train()
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


def test_the_same_program_gives_the_same_log(tmp_path: Path) -> None:
    def run(folder: Path) -> list[OperationRecord]:
        with record_operations(folder, HEADER, modules={}):
            torch.linspace(0.0, 1.0, 1000).exp().cumsum(0).sum().item()
        return records_of(folder)

    first, second = (run(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert len(first) == 5


def test_a_block_may_begin_within_a_running_module(tmp_path: Path) -> None:
    """As an attached training's does: leaving a module that was never entered was an ``IndexError``."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    opened = record_operations(tmp_path, HEADER, modules={"policy": model})

    def begin(module: torch.nn.Module, inputs: object) -> None:
        opened.__enter__()

    handle = model.register_forward_pre_hook(begin)
    output = model(torch.ones(1, 3))
    handle.remove()
    output.sum()
    opened.__exit__(None, None, None)
    found = [(record.operator, record.module) for record in records_of(tmp_path) if record.num_digests]
    assert found == [("aten.addmm.default", "policy.0"), ("aten.tanh.default", "policy.1"), ("aten.sum.default", "")]


def test_a_step_that_fails_leaves_no_log(tmp_path: Path) -> None:
    def fail() -> None:
        with record_operations(tmp_path, HEADER, modules={}):
            torch.ones(2) + torch.ones(3)

    with pytest.raises(RuntimeError, match="size of tensor"):
        fail()
    assert find_operation_logs(tmp_path) == {}
    assert list((tmp_path / "operations" / "step_000000").iterdir()) == []


def test_an_operation_that_the_program_lets_fail_is_in_the_log(tmp_path: Path) -> None:
    def try_it() -> None:
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2).add(torch.ones(3))

    with record_operations(tmp_path, HEADER, modules={}):
        try_it()
    assert records_of(tmp_path)[-1].values == ("raised RuntimeError",)


def test_a_tensor_subclass_is_seen_by_its_parts(tmp_path: Path) -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
        ) -> object:
            return func(*(each.inner if isinstance(each, Wrapped) else each for each in args), **(kwargs or {}))

    inner = torch.ones(2)
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, inner.shape)
    wrapped.inner = inner
    with record_operations(tmp_path, HEADER, modules={}):
        result = wrapped + 1.0
    assert torch.equal(result, torch.full((2,), 2.0))
    (record,) = records_of(tmp_path)
    assert [each.digest for each in record.inputs] == [host_digest(inner)]


def test_a_log_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    with record_operations(tmp_path, HEADER, modules={}):
        torch.ones(2).add(1.0)
    path = operation_log_path(tmp_path, step=0, global_rank=0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(TraceError, match="has 2 records and says nothing: it was cut off"):
        list(OperationLog.open(path).records())
    path.write_text("".join([*lines[:-2], lines[-2][:20]]))
    with pytest.raises(TraceError, match="a line is no JSON"):
        list(OperationLog.open(path).records())


@pytest.mark.parametrize("change", [lambda digest: digest[::-1], lambda digest: "0" * 16])
def test_a_log_whose_digests_were_changed_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    """Two replays are equal where the logged digests are, so that no line may change unseen."""
    with record_operations(tmp_path, HEADER, modules={}):
        torch.ones(2).add(1.0)
    path = operation_log_path(tmp_path, step=0, global_rank=0)
    digest = host_digest(torch.full((2,), 2.0))
    path.write_text(path.read_text().replace(digest, change(digest)))
    with pytest.raises(TraceError) as caught:
        list(OperationLog.open(path).records())
    assert str(caught.value) == f"{path}: its lines do not match their digest (SHA-256); it was changed"


def test_a_log_of_an_earlier_release_without_a_digest_opens(tmp_path: Path) -> None:
    with record_operations(tmp_path, HEADER, modules={}):
        torch.ones(2).add(1.0)
    path = operation_log_path(tmp_path, step=0, global_rank=0)
    *lines, footer = path.read_text().splitlines()
    num_records = json.loads(footer)["num_records"]
    path.write_text("\n".join([*lines, json.dumps({"num_records": num_records})]) + "\n")
    assert len(list(OperationLog.open(path).records())) == num_records


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps({"format_version": 99}) + "\n")
    with pytest.raises(TraceError) as caught:
        OperationLog.open(path)
    assert str(caught.value) == f"{path}: format version 99, expected 1"


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128),
        *(torch.int8, torch.uint8, torch.bool),
    ],
)
@pytest.mark.parametrize("digest", [host_digest, lambda tensor: as_hex(int(device_digest(tensor)))])
def test_a_digest_sees_bits_and_their_order_and_nothing_else(dtype: torch.dtype, digest: object) -> None:
    tensor = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor[:, [1, 0, 2]])
    assert digest(tensor) != digest(torch.zeros_like(tensor))


@pytest.mark.parametrize("digest", [host_digest, lambda tensor: as_hex(int(device_digest(tensor)))])
def test_a_digest_tells_minus_zero_and_kinds_of_nan(digest: object) -> None:
    bits = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001], dtype=torch.int32)
    values = [digest(each.reshape(1).view(torch.float32)) for each in bits]
    assert len(set(values)) == 4


@pytest.mark.parametrize("digest", [host_digest, lambda tensor: as_hex(int(device_digest(tensor)))])
def test_a_digest_takes_repeated_memory_once_and_conjugates_as_they_read(digest: object) -> None:
    repeated = torch.ones(1, 3).expand(1 << 40, 3)
    assert digest(repeated) == digest(torch.ones(1, 3))
    turned = torch.tensor([1 + 2j]).conj()
    assert digest(turned) == digest(torch.tensor([1 - 2j]))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=20), st.data())
def test_any_flipped_bit_and_any_swap_changes_the_device_digest(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.int32)
    position, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    flipped = tensor.clone()
    flipped[position] ^= torch.from_numpy(np.array(1 << bit, dtype=np.uint32).view(np.int32))
    assert int(device_digest(tensor)) != int(device_digest(flipped))
    swapped = tensor.roll(1)
    assert torch.equal(tensor, swapped) == (int(device_digest(tensor)) == int(device_digest(swapped)))


def test_the_device_digest_covers_every_block_of_a_long_tensor() -> None:
    tensor = torch.zeros((1 << 22) + 5, dtype=torch.int8)
    digest = int(device_digest(tensor))
    tensor[-1] = 1
    assert int(device_digest(tensor)) != digest
