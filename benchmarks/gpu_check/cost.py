"""Measures what ``attach`` adds to a step of the attached example, and counts copies and waits of the host."""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.attach import EXAMPLE, LARGEST_SKETCH_RATIO, PART_BYTES, Trained
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler.config.instruments import TRACE_KINDS, TraceConfig
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.sketch.sums import SketchSums
from mock_scheduler.trace.sketch.totals import Totals

_FULL = "whole tensors of the default kinds"
_MODES: Mapping[str, TraceConfig | None] = {
    "none": None,
    "nothing asked": None,
    "sketches of the default kinds": TraceConfig(level="sketch"),
    "sketches of all kinds": TraceConfig(level="sketch", kinds=[*TRACE_KINDS]),
    _FULL: TraceConfig(level="full", part_bytes=PART_BYTES),
}
_TRACED = tuple(mode for mode, trace in _MODES.items() if trace is not None)
#: Steps before those that count, and these; whole tensors are gigabytes on the disk.
_WARM_UP, _ROUNDS = 2, 5
_FULL_WARM_UP, _FULL_ROUNDS = 1, 1
#: The training's thread waits in them until the device has done what was asked before. For an event
#: (cudaEventSynchronize) only the thread in the background waits.
_WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"})
_COPY = "Memcpy DtoH"
_SKETCH_ERROR = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCounts:
    """Counts in one step how often the host waited for the device, copies from it, and kernels that it started."""

    waits: int
    copies: int
    kernels: int


def count_events(names: Iterable[str]) -> HostCounts:
    """Counts waits, copies and starts of kernels among the names of a profile's events."""
    counted = Counter(names)
    waits = sum(counted[name] for name in _WAITS)
    copies = sum(number for name, number in counted.items() if name.startswith(_COPY))
    kernels = sum(number for name, number in counted.items() if "LaunchKernel" in name)
    return HostCounts(waits=waits, copies=copies, kernels=kernels)


def check(context: CheckContext) -> None:
    """Compares sketches, profiles a step of a shallow model and of a deep one, then times every mode at both sizes.

    Whole tensors, gigabytes on the disk, come last.
    """
    use_host_device()
    sys.path.insert(0, str(EXAMPLE))
    example = importlib.import_module("train")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        _compare_sketches(context, dtype)
    sizes = {
        hidden: _arguments(example, hidden=hidden, layers=2, is_gpu=context.is_gpu)
        for hidden in ((2048, 4096) if context.is_gpu else (64,))
    }
    example.start_megatron(next(iter(sizes.values())))
    _count_waits(context, example)
    plain = {hidden: _time_modes(context, example, args, hidden) for hidden, args in sizes.items()}
    for hidden, args in sizes.items():
        whole_s = _time_mode(context, example, args, hidden, _FULL)
        context.log.note(f"{_FULL}, hidden size {hidden}", f"{whole_s / plain[hidden]:.3f} times a step")
    dist.destroy_process_group()


def _arguments(example: Any, *, hidden: int, layers: int, is_gpu: bool) -> Any:  # noqa: ANN401 - of argparse
    sizes = {"--hidden-size": hidden, "--seq-length": 1024 if is_gpu else 32, "--num-layers": layers}
    words = [text for name, value in sizes.items() for text in (name, str(value))]
    sys.argv[1:] = [*words, "--vocab-size", "1024", "--layers", "local", *(["--bf16"] if is_gpu else [])]
    return example.parse_arguments()


def _time_modes(context: CheckContext, example: Any, args: Any, hidden: int) -> float:  # noqa: ANN401
    """Times every mode but whole tensors; returns the seconds of a step where nothing is attached."""
    medians = {mode: _time_mode(context, example, args, hidden, mode) for mode in _MODES if mode != _FULL}
    rows = [(mode, f"{1e3 * value:.2f}", f"{value / medians['none']:.3f}") for mode, value in medians.items()]
    context.log.table(f"a step at hidden size {hidden}", ("attached", "ms", "times a step without"), rows)
    ratio = medians["sketches of the default kinds"] / medians["none"]
    if context.is_gpu:
        hold_ratio(context.log, hidden, ratio)
    else:
        context.log.note(f"sketches of the default kinds, hidden size {hidden}", f"{ratio:.3f} times a step")
    return medians["none"]


def _time_mode(context: CheckContext, example: Any, args: Any, hidden: int, mode: str) -> float:  # noqa: ANN401
    """Returns the median seconds of a step."""
    trained = Trained(example, args, mode, context.folder / str(hidden), modes=_MODES)
    times = []
    warm_up, rounds = (_FULL_WARM_UP, _FULL_ROUNDS) if mode == _FULL else (_WARM_UP, _ROUNDS)
    for number in range(warm_up + rounds):
        _synchronize(context)
        started_s = time.perf_counter()
        trained.take_step()
        _synchronize(context)
        if number >= warm_up:
            times.append(time.perf_counter() - started_s)
        trained.forget()
    if mode == "nothing asked":
        context.log.hold(
            f"nothing asked, hidden size {hidden}: hooks left",
            is_held=trained.hooks() == 0,
            found=trained.hooks(),
            expected="0",
        )
    del trained
    gc.collect()
    if context.is_gpu:
        torch.cuda.empty_cache()
    return statistics.median(times)


def hold_ratio(log: FindingsLog, hidden: int, ratio: float) -> None:
    """Holds a step with sketches to the project's bar (``benchmarks.attach``)."""
    log.hold(
        f"sketches of the default kinds, hidden size {hidden}",
        is_held=ratio <= LARGEST_SKETCH_RATIO,
        found=f"{ratio:.3f} times a step",
        expected=f"at most {LARGEST_SKETCH_RATIO}",
    )


def _count_waits(context: CheckContext, example: Any) -> None:  # noqa: ANN401
    counts: dict[str, dict[int, HostCounts]] = {mode: {} for mode in _MODES}
    for layers in (1, 3):
        args = _arguments(example, hidden=256 if context.is_gpu else 64, layers=layers, is_gpu=context.is_gpu)
        for mode in _MODES:
            trained = Trained(example, args, mode, context.folder / f"waits{layers}", modes=_MODES)
            trained.take_step()
            trained.forget()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.is_gpu else [])]
            with profile(activities=activities) as profiled:
                trained.take_step()
            trained.forget()
            counts[mode][layers] = count_events(event.name for event in profiled.events() or ())
    if not context.is_gpu:
        context.log.not_run("waits of the host within a step", "the host waits for no device on the CPU")
        return
    rows = [
        (mode, *(f"{found[layers].waits} / {found[layers].copies} / {found[layers].kernels}" for layers in (1, 3)))
        for mode, found in counts.items()
    ]
    context.log.table(
        "waits of the host / copies to it / kernels, in a step", ("attached", "1 layer", "3 layers"), rows
    )
    for mode in _TRACED:
        hold_waits(context.log, mode, plain=counts["none"], traced=counts[mode])


def hold_waits(
    log: FindingsLog, mode: str, *, plain: Mapping[int, HostCounts], traced: Mapping[int, HostCounts]
) -> None:
    """Holds the waits that a trace adds to the same number for any depth: none is made for a tensor.

    A profiler that may not see the device counts no kernel; it shows nothing.
    """
    question = f"{mode}: waits of the host that a step gets"
    if not all(counts.kernels for counts in (*plain.values(), *traced.values())):
        log.not_run(question, "the profiler saw no kernel of the device")
        return
    added = [traced[layers].waits - plain[layers].waits for layers in sorted(plain)]
    log.hold(
        question,
        is_held=len(set(added)) == 1,
        found=f"{' and '.join(map(str, added))} with {' and '.join(map(str, sorted(plain)))} layers",
        expected="as many for a deep model as for a shallow one",
    )


def _compare_sketches(context: CheckContext, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(20_200)
    values = torch.randn(1500, 2100, generator=generator, dtype=torch.float64).to(dtype)
    sums = [SketchSums(dtype, device) for device in (torch.device("cpu"), context.device)]
    for item in sums:
        item.add(values.to(item.totals.slots.device), whole("x", (1500, 2100)))
    host, other = (item.totals for item in sums)
    name = str(dtype).removeprefix("torch.")
    hold_sketch(context.log, f"a sketch of {name} on the device", host, other)


def hold_sketch(log: FindingsLog, question: str, host: Totals, other: Totals) -> None:
    """Holds a device's sums to the CPU's: counts to the bit, slots to rounding; notes whether slots have the bits."""
    slots, counts = other.slots.cpu(), other.counts.cpu()
    error = float((slots - host.slots).norm()) / float(host.slots.norm())
    is_equal = torch.equal(counts, host.counts)
    log.hold(
        question,
        is_held=is_equal and error < _SKETCH_ERROR,
        found=f"fingerprint {'equal' if is_equal else 'another'}, slots {f'off by {error:.1g}' if error else 'equal'}",
        expected=f"equal fingerprint, slots off by less than {_SKETCH_ERROR:g}",
    )


def _synchronize(context: CheckContext) -> None:
    if context.is_gpu:
        torch.cuda.synchronize()
