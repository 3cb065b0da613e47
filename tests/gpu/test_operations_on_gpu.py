"""The operation log on a GPU: backward runs in threads of autograd, and digests stay on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mock_scheduler.determinism.operations import OperationLogHeader, OperationRecord, Phase, find_operation_logs
from mock_scheduler.determinism.operations.recorder import record_operations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def record_step(folder: Path) -> list[OperationRecord]:
    """A step of a small model on the GPU, with work on a second stream."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    inputs = torch.randn(16, 64, device="cuda")
    header = OperationLogHeader(step=0, global_rank=0, world_size=1, settings={})
    with record_operations(folder, header, modules={"policy": model}):
        for _ in range(200):
            model(inputs).pow(2).sum().backward()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            inputs.exp()
        torch.cuda.current_stream().wait_stream(side)
    return list(find_operation_logs(folder)[0][0].records())


def test_backward_is_seen_with_its_modules_and_equal_runs_have_equal_digests(tmp_path: Path) -> None:
    first, second = (record_step(tmp_path / name) for name in ("first", "second"))
    assert first == second
    backward = [record for record in first if record.phase is Phase.BACKWARD and record.num_digests]
    assert {record.lane for record in backward} == {"backward-1"}
    assert {record.module for record in backward} >= {"policy.0", "policy.1", "policy.2"}
    assert sum(record.operator == "aten.gelu_backward.default" for record in backward) == 200


def test_an_atomic_sum_is_caught_by_its_output(tmp_path: Path) -> None:
    """index_add in float32 on many equal indices adds by atomics where torch's deterministic mode is off."""
    index = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    values = torch.randn(1 << 20, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def run(folder: Path) -> list[OperationRecord]:
        header = OperationLogHeader(step=0, global_rank=0, world_size=1, settings={})
        with record_operations(folder, header, modules={}):
            for _ in range(20):
                torch.zeros(2, 4, device="cuda").index_add_(0, index, values)
        return list(find_operation_logs(folder)[0][0].records())

    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    sums = [record for record in (*first, *second) if record.operator == "aten.index_add_.default"]
    assert len({tuple(tensor.digest for tensor in record.inputs) for record in sums}) == 1
    assert len({record.outputs[0].digest for record in sums}) > 1


def test_a_communication_over_nccl_is_recorded(tmp_path: Path) -> None:
    """NCCL gives no work handle for a call that is not asynchronous: waiting for it ended the doctor's replay."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        header = OperationLogHeader(step=0, global_rank=0, world_size=1, settings={})
        with record_operations(tmp_path / "run", header, modules={}):
            values = torch.arange(4.0, device="cuda")
            torch.distributed.all_reduce(values)
            torch.distributed.all_reduce(values, async_op=True).wait()
            values.sum().item()
    finally:
        torch.distributed.destroy_process_group()
    operators = [record.operator for record in find_operation_logs(tmp_path / "run")[0][0].records()]
    assert operators.count("c10d.allreduce_.default") >= 2  # and what the group does at its first use
