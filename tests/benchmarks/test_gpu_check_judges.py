"""What the checks for a GPU judge: each says "failed" of a planted wrong value, and names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import cost, determinism, example, faults, fp8, gemm_orders, graphs, training
from benchmarks.gpu_check.cases import differing, distance
from benchmarks.gpu_check.findings import FindingsLog, Outcome, read_findings
from mock_scheduler.determinism.guard import read_back
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.sketch.totals import Totals
from tests.faults.own.campaign import OwnJudgement


@pytest.fixture
def log(tmp_path: Path) -> FindingsLog:
    return FindingsLog(tmp_path / "findings.json")


def failed(log: FindingsLog) -> dict[str, str]:
    """What was said of the questions that failed; they are also in the file."""
    found, _ = read_findings(log.path)
    assert list(found) == log.findings
    return {item.name: item.found for item in found if item.outcome is Outcome.FAILED}


def verdict(kind: str, **more: Any) -> Any:
    """A candidate of an alignment, as the checks read it."""
    values = {"name": "tp2", "verdict": SimpleNamespace(kind=SimpleNamespace(value=kind)), "run": SimpleNamespace()}
    return SimpleNamespace(**{**values, "log_path": None, **more})


@pytest.fixture
def plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (example, fp8):
        monkeypatch.setattr(module, "describe", lambda item: item.verdict.kind.value)


def test_a_setting_without_effect_fails_by_name(log: FindingsLog) -> None:
    values = read_back({}) | {"torch.deterministic_algorithms": "False"}
    determinism.hold_settings(log, values)
    assert "torch.deterministic_algorithms is False, must be True" in failed(log)["settings of a deterministic run"]


@pytest.fixture
def _mode_restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_mode_restored")
def test_an_operation_that_does_not_repeat_fails_by_name_and_a_refused_one_does_not(log: FindingsLog) -> None:
    calls = iter(range(1000))

    def refused() -> tuple[torch.Tensor, ...]:
        raise RuntimeError("index_add_cuda does not have a deterministic implementation\nmore")

    def failing() -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    operations = {
        "drifting": lambda: (torch.full((3,), float(next(calls))),),
        "steady": lambda: (torch.ones(3),),
        "refused": refused,
        "failing": failing,
    }
    determinism.repeat_operations(log, operations)
    assert failed(log) == {"operations repeat in deterministic mode, or are refused": "drifting, failing"}
    assert dict(row[:2] for row in log.tables[0].rows) == {
        "drifting": "differs at repetition 1",
        "steady": "repeats",
        "refused": "refused: index_add_cuda does not have a deterministic implementation",
        "failing": "failed: CUDA out of memory. Tried to allocate 8.00 GiB.",
    }
    determinism.repeat_operations(log, {"refused": refused})  # where nothing repeats, nothing was shown
    assert log.findings[-1].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("change", "text"),
    [({"num_digests": 2}, "does not repeat, equal bits"), ({"digest": "other"}, "repeats, other bits on both ranks")],
)
def test_a_collective_that_does_not_repeat_or_agree_fails(log: FindingsLog, change: dict[str, Any], text: str) -> None:
    good = {"num_digests": 1, "digest": "a", "order": "by rank"}
    determinism.hold_collectives(log, "nccl", [{"all-reduce": good}, {"all-reduce": good}])
    assert failed(log) == {}
    determinism.hold_collectives(log, "nccl", [{"all-reduce": good}, {"all-reduce": good | change}])
    assert text in failed(log)["all-reduce over nccl"]


def test_the_order_of_a_sum_is_told() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    ascending, descending = (parts[0] + parts[1]) + parts[2], (parts[2] + parts[1]) + parts[0]
    middle = torch.tensor([1.0])  # exact
    orders = [determinism.describe_order(found, parts, torch.add) for found in (ascending, middle)]
    assert orders == ["by rank", "another"]
    assert torch.equal(ascending, descending)
    assert determinism.describe_order(parts[1] + parts[0], parts[:2], torch.add) == "by rank"


def test_attention_that_differs_fails_with_its_backend_and_an_absent_backend_is_not_run(log: FindingsLog) -> None:
    determinism.hold_attention(log, "attention, fused", "Selected backend = FusedAttention\ndiffers at repetition 3")
    assert failed(log) == {"attention, fused": "differs at repetition 3 (Selected backend = FusedAttention)"}
    absent = "ValueError: No dot product attention backend is available for the provided inputs."
    determinism.hold_attention(log, "attention, flash", f"Traceback ...\n{absent}")
    assert (log.findings[-1].outcome, log.findings[-1].found) == (Outcome.NOT_RUN, absent)
    determinism.hold_attention(log, "attention, unfused", "RuntimeError: CUDA error: an illegal memory access")
    assert "an illegal memory access" in failed(log)["attention, unfused"]


def test_steps_with_one_other_bit_fail_by_the_tensors_name(log: FindingsLog) -> None:
    key = TraceKey(step=0, update=0, kind="gradient", name="decoder.final_layernorm.weight")
    value = torch.tensor([1.0, 2.0])
    other = value.clone()
    other.view(torch.int32)[1] ^= 1
    assert differing({key: value}, {key: value.clone()}) == []
    assert differing({}, {}) == ["nothing was traced"]
    assert differing({key: value}, {}) == [f"{key.describe()} (on one side)"]
    training.hold_equal(log, "twice", differing({key: value}, {key: other}))
    assert failed(log) == {"twice": f"1 differ, first {key.describe()}"}


def test_gradients_beyond_the_other_rounding_fail(log: FindingsLog) -> None:
    wide = {"weight": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    own = distance({"weight": torch.tensor([3.0, 4.5], dtype=torch.float64)}, wide)
    assert own == pytest.approx(0.1)
    assert distance({}, wide) == float("inf")
    for value in (own, float("inf"), float("nan")):
        training.hold_rounding(log, str(value), training.Distances(own=value, other=0.02, what="the CPU's float32"))
    assert list(failed(log)) == [str(own), "inf", "nan"]
    training.hold_rounding(log, "near", training.Distances(own=own, other=0.03, what="the CPU's float32"))
    assert "near" not in failed(log)


@pytest.mark.usefixtures("plain_words")
def test_a_layout_that_diverges_fails(log: FindingsLog) -> None:
    context: Any = SimpleNamespace(log=log)
    for kind in ("identical", "identical (emulated)", "rounding", "suspect", "diverged", "incomparable", "unverified"):
        example.hold_passing(context, kind, verdict(kind))
    assert list(failed(log)) == ["suspect: tp2", "diverged: tp2", "incomparable: tp2", "unverified: tp2"]


def test_a_product_whose_bits_depend_on_its_shape_fails_by_its_row(log: FindingsLog) -> None:
    shapes = ((8, 16, 12),)
    gemm_orders.compare_all(log, shapes, torch.device("cpu"), torch.matmul, title="plain")
    assert failed(log) == {}
    assert len(log.tables[0].rows) == 2 * 2 * 3  # dtypes, degrees (8 does not divide 12), splits
    odd = gemm_orders._compare((33, 16, 12), torch.float32, torch.device("cpu"), torch.matmul)
    assert [(item.split, item.degree) for item in odd] == [
        (split, degree) for degree in (2, 4) for split in ("output features", "input features")
    ]

    def of_small_tiles(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = left @ right
        return (
            found
            if right.shape[-1] == 12
            else found.nextafter(torch.tensor(9.0))
            if found.dtype == torch.float32
            else found
        )

    gemm_orders.compare_all(log, shapes, torch.device("cpu"), of_small_tiles, title="planted")
    found = failed(log)["planted: emulation has the candidate's bits"]
    assert found.startswith("2 of 12 not, first 8 x 16 x 12, float32, output features, 2, 0.0%")


def test_batch_invariant_kernels_need_no_transformer_engine() -> None:
    def patch_engine() -> None:
        raise ModuleNotFoundError("No module named 'transformer_engine'")

    @contextmanager
    def set_mode(_: bool) -> Iterator[None]:
        kernels._te_patch_for_batch_invariant()
        yield
        kernels._te_unpatch_for_batch_invariant()

    names = ("_te_patch_for_batch_invariant", "_te_unpatch_for_batch_invariant")
    kernels = SimpleNamespace(set_batch_invariant_mode=set_mode, **dict.fromkeys(names, patch_engine))
    with gemm_orders.use_invariant_kernels(kernels, has_transformer_engine=False):
        pass
    with pytest.raises(ModuleNotFoundError), gemm_orders.use_invariant_kernels(kernels, has_transformer_engine=True):
        pass


def judgement(**changes: Any) -> OwnJudgement:
    values = {"precision": "float32", "model": "dense", "run": "dense tp2", "fault": "second-beta", "sentence": "it is"}
    values |= {"verdict": "diverged", "place": "update, update 0, x", "is_placed": True, "fired": 2}
    return OwnJudgement(**{**values, **changes})


def test_a_fault_that_is_missed_or_misplaced_or_never_fired_fails_by_name(log: FindingsLog) -> None:
    context: Any = SimpleNamespace(log=log)
    assert len(faults.FAULTS) == len(set(faults.FAULTS)) == 10
    faults.hold_judgement(context, judgement(), "diverged: it is")
    assert failed(log) == {}
    for changes in ({"is_placed": False}, {"verdict": "identical"}, {"failure": "the fault never fired"}):
        faults.hold_judgement(context, judgement(**changes), "diverged: it is")
    faults.hold_judgement(context, judgement(fault="", verdict="rounding"), "rounding")
    assert [item.name for item in log.findings if item.outcome is Outcome.FAILED] == ["second-beta"] * 3 + ["no fault"]
    assert "the fault never fired" in log.findings[3].found


def test_waits_that_grow_with_the_model_fail_and_copies_are_counted(log: FindingsLog) -> None:
    names = ["cudaStreamSynchronize", "cudaLaunchKernel", "Memcpy DtoH (Device -> Pinned)", "cudaMemcpy", "aten::add"]
    assert cost.count_events(names) == cost.HostCounts(waits=2, copies=1, kernels=1)

    def counts(*waits: int, kernels: int = 7) -> dict[int, cost.HostCounts]:
        of_depth = zip((1, 3), waits, strict=True)
        return {layers: cost.HostCounts(waits=number, copies=1, kernels=kernels) for layers, number in of_depth}

    plain, even, growing = counts(4, 6), counts(9, 11), counts(9, 31)
    cost.hold_waits(log, "sketches", plain=plain, traced=even)
    assert failed(log) == {}
    cost.hold_waits(log, "whole tensors", plain=plain, traced=growing)
    assert failed(log) == {"whole tensors: waits of the host that a step gets": "5 and 25 with 1 and 3 layers"}
    cost.hold_waits(log, "unseen", plain=plain, traced=counts(0, 0, kernels=0))
    assert (log.findings[-1].outcome, log.findings[-1].found) == (
        Outcome.NOT_RUN,
        "the profiler saw no kernel of the device",
    )
    assert cost.count_events(["cudaEventSynchronize"]).waits == 0  # of the thread in the background
    cost.hold_ratio(log, 2048, 1.2)
    assert failed(log)["sketches of the default kinds, hidden size 2048"] == "1.200 times a step"


def test_a_sketch_with_another_fingerprint_or_slot_fails(log: FindingsLog) -> None:
    good = Totals.zero(torch.device("cpu"))
    good.slots.fill_(2.0)
    wrong = [Totals.zero(torch.device("cpu")) for _ in range(2)]
    for item in wrong:
        item.slots.copy_(good.slots)
    wrong[0].counts[0] += 1
    wrong[1].slots[5] += 1e-6
    cost.hold_sketch(log, "good", good, good)
    for number, item in enumerate(wrong):
        cost.hold_sketch(log, str(number), good, item)
    assert failed(log) == {"0": "fingerprint another, slots equal", "1": "fingerprint equal, slots off by 1e-08"}


@pytest.mark.usefixtures("plain_words")
def test_fp8_that_was_off_or_does_not_repeat_or_is_emulated_fails(log: FindingsLog) -> None:
    run = SimpleNamespace(order_limits=("fp8 is 'hybrid'",), unobserved_modules=("mlp.linear_fc1",))
    good = {"again": verdict("identical", run=run), "bfloat16": verdict("diverged"), "tp2": verdict("suspect")}
    fp8.judge(log, "delayed", good)
    assert failed(log) == {}
    bare = SimpleNamespace(order_limits=(), unobserved_modules=())
    wrong = {"again": verdict("diverged", run=bare), "bfloat16": verdict("identical"), "tp2": verdict("suspect")}
    fp8.judge(log, "block", wrong)
    assert list(failed(log)) == [
        "FP8, block: again",
        "FP8, block: bfloat16 instead has other bits",
        "FP8, block: emulation refuses it by name",
    ]


def test_a_recipe_that_the_gpu_lacks_is_not_run_and_another_error_fails(log: FindingsLog) -> None:
    fp8.tell_failure(
        log, "blockwise", "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    )
    assert (log.findings[-1].outcome, failed(log)) == (Outcome.NOT_RUN, {})
    fp8.tell_failure(log, "delayed", "the baseline failed (exit code 1): CUDA error: an illegal memory access")
    assert list(failed(log)) == ["FP8, delayed"]


def test_a_capture_that_nobody_speaks_of_fails(log: FindingsLog) -> None:
    graphs.hold_refused(log, "a layer", "")
    graphs.hold_refused(
        log, "a key", "attach cannot follow this training: CUDA graphs: a replayed graph calls no hooks"
    )
    assert failed(log) == {"a layer": "nothing was said"}
