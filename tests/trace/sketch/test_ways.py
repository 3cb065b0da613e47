"""A sketch is computed in two ways, by C on the host and by torch anywhere: both give the same, without waiting."""

import ctypes
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.shards import ShardSpec, whole
from mock_scheduler.trace.sketch import host, sums
from mock_scheduler.trace.sketch.constants import BLOCK
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.trace.sketch.host import can_sum
from mock_scheduler.trace.sketch.sketch import Sketch, rounding_bound, sketch_piece
from tests.trace.sketch.pieces import at, normal, pieces

NATIVE_DTYPES = [torch.float32, torch.bfloat16, torch.float64]

needs_native = pytest.mark.skipif(
    not can_sum(torch.float32), reason="native.c is not built: no C compiler, or `pip install -e .` not yet repeated"
)


def assert_equal(found: Sketch, expected: Sketch) -> None:
    assert (found.fingerprint, found.num_elements) == (expected.fingerprint, expected.num_elements)
    assert (found.num_nan, found.num_infinite) == (expected.num_nan, expected.num_infinite)
    assert float((found.sums - expected.sums).norm()) <= rounding_bound(expected.norm, expected.num_elements)
    assert found.sum_of_squares == pytest.approx(expected.sum_of_squares, rel=1e-12)


def sketch_in_torch(tensor: torch.Tensor, spec: ShardSpec) -> Sketch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "can_sum", lambda dtype: False)
        return sketch_piece(tensor, spec)


@needs_native
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_both_ways_give_the_same(dtype: torch.dtype) -> None:
    for tensor, spec in pieces(dtype):
        assert_equal(sketch_piece(tensor, spec), sketch_in_torch(tensor, spec))


@needs_native
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_both_ways_count_what_is_not_finite(dtype: torch.dtype) -> None:
    for tensor, spec in pieces(dtype):
        flat = tensor.contiguous().clone().view(-1)
        flat[::5], flat[1::7], flat[2::11] = math.nan, math.inf, -math.inf
        changed = flat.view(tensor.shape)
        found = sketch_piece(changed, spec)
        assert (found.num_nan, found.num_infinite) == (int(flat.isnan().sum()), int(flat.isinf().sum()))
        assert_equal(found, sketch_in_torch(changed, spec))


def test_numbers_that_are_negative_by_a_flag_are_summed_as_such() -> None:
    flagged = torch.complex(normal(9), normal(9)).conj().imag
    assert flagged.is_neg()
    spec = whole("x", (9,))
    for found in (sketch_piece(flagged, spec), sketch_in_torch(flagged, spec)):
        assert_equal(found, sketch_piece(-normal(9), spec))


@needs_native
def test_squares_that_overflow_are_no_infinities() -> None:
    found = sketch_piece(torch.full((20,), 1e200, dtype=torch.float64), whole("x", (20,)))
    assert (found.num_infinite, found.sum_of_squares) == (0, math.inf)
    assert bool(found.sums.isfinite().all())


@needs_native
def test_threads_share_the_work_and_change_rounding_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(host, "_ELEMENTS_OF_A_PART", 1)
    host._workers.cache_clear()
    try:
        for tensor, spec in pieces(torch.float32):
            assert_equal(sketch_piece(tensor, spec), sketch_in_torch(tensor, spec))
        tensor, spec = normal(100, 3000), at(5, 100, 3000)
        assert torch.equal(sketch_piece(tensor, spec).sums, sketch_piece(tensor, spec).sums)
    finally:
        host._workers(3).shutdown()
        host._workers.cache_clear()


@needs_native
def test_sums_have_the_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ELEMENTS_OF_A_PART", BLOCK)
    cases = [
        (normal(7 * BLOCK + 5), whole("x", (7 * BLOCK + 5,))),
        (normal(200, 3000), at(2**64 // 3000 - 3, 200, 3000)),
    ]
    found = []
    for num_threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        host._workers.cache_clear()
        try:
            sketches = [sketch_piece(tensor, spec) for tensor, spec in cases]
        finally:
            if num_threads > 1:
                host._workers(num_threads).shutdown()
            host._workers.cache_clear()
        found.append([(item.sums.tolist(), item.sum_of_squares, item.fingerprint) for item in sketches])
    assert found[0] == found[1] == found[2]


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sketch_rows=None))
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    assert host._native.__wrapped__() is None


def test_an_error_of_one_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("one thread's")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(host, "_ELEMENTS_OF_A_PART", 1)
    monkeypatch.setattr(host, "_native", lambda: fail)
    host._workers.cache_clear()
    try:
        with pytest.raises(MemoryError, match="one thread's"):
            sketch_piece(normal(3, BLOCK), whole("x", (3, BLOCK)))
    finally:
        host._workers(2).shutdown()
        host._workers.cache_clear()


#: Operations whose result the host has to wait for, on a GPU.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "item")


class NoWaiting(TorchDispatchMode):
    """Stands in for a GPU: an operation that would make the host wait for it is an error."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [*NATIVE_DTYPES, torch.float16, torch.int64, torch.bool])
def test_on_a_device_nothing_is_waited_for_until_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    tensor = (normal(3, BLOCK) * 3).to(dtype)
    spec = whole("x", tuple(tensor.shape))
    expected = sketch_piece(tensor, spec)
    monkeypatch.setattr(sums, "_is_host", lambda device: False)
    sketch_piece(tensor, spec)  # tables are made once
    sink = SketchSink(tmp_path, step=0, place=RankPlace(global_rank=0, coordinates={}), world_size=1)
    with NoWaiting():  # type: ignore[no-untyped-call]
        sink.add(TraceEntry(update=0, kind="gradient", spec=spec, tensor=tensor))
        with pytest.raises(AssertionError, match="_local_scalar_dense waits for the device"):
            float(tensor[0, 0])
    sink.close(StepFooter(ranks=(0,), kinds=("gradient",), patterns=("*",)))
    assert_equal(sketch_piece(tensor, spec), expected)


def test_modes_of_a_training_do_not_see_the_work_of_a_sketch() -> None:
    class Counting(TorchFunctionMode):
        num_calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    tensor, total = normal(3, BLOCK), sums.SketchSums(torch.float32, torch.device("cpu"))
    spec = whole("x", (3, BLOCK))
    with Counting() as counting:
        total.add(tensor, spec)
    assert counting.num_calls < 4  # around the sums, of which there are many more
