"""Comparing two traces against reading the same files with safetensors and subtracting, side by side in one run.

Two traces of ``--gib`` each for float32 and for bfloat16: gradients, parameters and activations of 16 Mi elements each,
cut over two tensor-parallel ranks. The third is the first with every element changed by one unit in the last place, but
for the parameters of the start, which two runs share. All files are in the page cache. *Read and subtract* opens both
sides' files with safetensors, subtracts each pair of stored tensors and takes the largest |a - b|: it checks no digest,
merges nothing and computes one figure. *Compare* checks every byte against its CRC-32, merges the ranks' pieces,
compares replicas and computes all figures.

Both are measured on all cores, and on one. Beside the elapsed time stands the processor's time of all cores, which a
busy machine does not stretch as much. *Read and subtract* is one loop, as a person would write it; torch divides its
operations among the cores. The result says how many cores other processes kept busy while comparing: where they were
idle, the ratio of the elapsed times is what counts; else that of the processor's times says more, which however counts
each of the threads of *compare* in full.

Memory is what is resident beside the mapped files (RssAnon), at its largest while comparing, less what was before: also
as a curve over four sizes of a tensor. With ``--msprobe PYTHON`` msprobe's ``compare`` of the same tensors is measured
in the same run (``msprobe_peer``), without its start.

    python -m benchmarks.compare [--gib 1] [--rounds 3] [--folder DIR] [--msprobe PYTHON] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.compare_report import PeerResult, Result, print_results
from benchmarks.msprobe_peer import time_compare, write_dump
from mock_scheduler.comparison.bounds.bounds import UNBOUNDED
from mock_scheduler.comparison.measure.large_tensors import num_threads
from mock_scheduler.comparison.walk.traces import compare_traces
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.tensor_bytes import dtype_name, view_as_bits
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split

_ROWS, _COLUMNS = 4096, 4096
_DTYPES = (torch.float32, torch.bfloat16)
_CONTENTS = ("equal", "different")
#: Rows of the tensors of the memory curve: 8 to 64 MiB in float32.
_CURVE_ROWS = (512, 1024, 2048, 4096)
#: Of the tensors that msprobe compares too: 16 MiB in float32.
_PEER_ROWS = 1024
_NUM_RANKS = 2
_KINDS: tuple[TraceKind, ...] = ("activation", "initial", "gradient", "parameter")
_SAMPLE_S = 0.005


def main() -> None:
    """Write the traces, measure, print tables, and write the figures to ``--json``."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of each trace in float32; half of it in bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the traces are written; removed afterwards")
    parser.add_argument("--msprobe", type=Path, default=None, help="the Python of an environment with msprobe")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    num_names = max(1, round(arguments.gib * 2**30 / (_ROWS * _COLUMNS * 4 * len(_KINDS))))
    results, peers = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        for dtype in _DTYPES:
            results += measure_dtype(folder / dtype_name(dtype), dtype, num_names, rounds=arguments.rounds)
        curve = measure_memory(folder / "memory")
        if arguments.msprobe is not None:
            peers = [measure_peer(folder / "peer", dtype, arguments.msprobe.absolute()) for dtype in _DTYPES]
    print_results(results, curve, peers)
    if arguments.json is not None:
        content = {
            "num_elements": num_names * len(_KINDS) * _ROWS * _COLUMNS,
            "results": [asdict(item) for item in results],
            "memory": [{"tensor_bytes": size, "peak_bytes": peak} for size, peak in curve],
            "msprobe": [asdict(item) for item in peers],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def measure_dtype(folder: Path, dtype: torch.dtype, num_names: int, *, rounds: int) -> list[Result]:
    """Measures both contents, on all cores and then on one; removes the traces."""
    for name in ("baseline", *_CONTENTS):
        write_trace(folder / name, num_names=num_names, dtype=dtype, is_other=name == "different")
    results = []
    for num_cores in sorted({num_threads(), 1}, reverse=True):
        with on_cores(num_cores):
            results += [measure(content, folder, dtype, rounds=rounds) for content in _CONTENTS]
    shutil.rmtree(folder)
    return results


def measure_memory(folder: Path) -> list[tuple[int, int]]:
    """Returns, for each size of a tensor in bytes, the peak of memory while comparing one of every kind."""
    curve = []
    for rows in _CURVE_ROWS:
        for name in ("baseline", "different"):
            write_trace(folder / name, num_names=1, dtype=torch.float32, is_other=name == "different", num_rows=rows)
        with watch_memory() as peak:
            compare(folder / "baseline", folder / "different")
        curve.append((rows * _COLUMNS * 4, peak[0]))
        shutil.rmtree(folder)
    return curve


def measure_peer(folder: Path, dtype: torch.dtype, python: Path) -> PeerResult:
    """Compares the same tensors with msprobe, once, and with ``compare``: the median of three."""
    steps, empty = [], []
    for name in ("baseline", "different"):
        is_other = name == "different"
        write_trace(folder / name, num_names=1, dtype=dtype, is_other=is_other, num_rows=_PEER_ROWS)
        tensors = {
            kind: make_values(kind, seed=seed, dtype=dtype, is_other=is_other, num_rows=_PEER_ROWS)
            for seed, kind in enumerate(_KINDS)
        }
        steps.append(write_dump(folder / f"{name}_dump", tensors))
        empty.append(write_dump(folder / f"{name}_start", {"one": torch.ones(1)}))
    seconds = []
    for _ in range(4):
        started_s = time.perf_counter()
        compare(folder / "baseline", folder / "different")
        seconds.append(time.perf_counter() - started_s)
    msprobe_s = time_compare(python, (empty[0], empty[1]), (steps[0], steps[1]), folder / "output")
    shutil.rmtree(folder)
    compare_s = statistics.median(seconds[1:])
    return PeerResult(
        dtype=dtype_name(dtype),
        size_bytes=2 * len(_KINDS) * _PEER_ROWS * _COLUMNS * dtype.itemsize,
        compare_s=compare_s,
        msprobe_s=msprobe_s,
        ratio=msprobe_s / compare_s,
    )


@contextmanager
def on_cores(num_cores: int) -> Iterator[None]:
    """Lets this thread, those that it starts and torch use so many cores."""
    usable, num_before = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(usable)[:num_cores])
    torch.set_num_threads(num_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)
        torch.set_num_threads(num_before)


def write_trace(path: Path, *, num_names: int, dtype: torch.dtype, is_other: bool, num_rows: int = _ROWS) -> None:
    """One step of ``num_names`` names, each of all kinds, on two ranks."""
    sinks = [
        FullSink(path, step=0, place=RankPlace(global_rank=rank, coordinates={"tp": rank}), world_size=_NUM_RANKS)
        for rank in range(_NUM_RANKS)
    ]
    for number in range(num_names):
        for position, kind in enumerate(_KINDS):
            seed = number * len(_KINDS) + position
            values = make_values(kind, seed=seed, dtype=dtype, is_other=is_other, num_rows=num_rows)
            for rank, sink in enumerate(sinks):
                spec = ShardSpec(
                    name=f"decoder.layers.{number}.mlp.linear_fc2.weight",
                    global_shape=(num_rows, _COLUMNS),
                    local_shape=(num_rows // _NUM_RANKS, _COLUMNS),
                    splits=even_split(0, size=num_rows, rank=rank, num_ranks=_NUM_RANKS),
                )
                shard = cut_shard(values, spec)
                sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=shard, dims=("row", "column")))
    for sink in sinks:
        sink.close(StepFooter(ranks=tuple(range(_NUM_RANKS))))


def make_values(kind: TraceKind, *, seed: int, dtype: torch.dtype, is_other: bool, num_rows: int) -> torch.Tensor:
    """Normal numbers ``[num_rows, _COLUMNS]``; ``is_other``: each of them changed in its last bit."""
    values = torch.randn(num_rows, _COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if is_other and kind != "initial":
        view_as_bits(values).bitwise_xor_(1)
    return values


def measure(content: str, folder: Path, dtype: torch.dtype, *, rounds: int) -> Result:
    """Both routes in turns, after one of each that is not counted."""
    baseline, candidate = folder / "baseline", folder / content
    seconds: dict[str, list[float]] = {"read": [], "compare": []}
    cpu_seconds: dict[str, list[float]] = {"read": [], "compare": []}
    others: list[float] = []
    routes: dict[str, Callable[[Path, Path], None]] = {"read": read_and_subtract, "compare": compare}
    peak_bytes = 0
    for turn in range(rounds + 1):
        for name, route in routes.items():
            with watch_memory() as peak:
                busy_s, started_s, started_cpu_s = _busy_s(), time.perf_counter(), time.process_time()
                route(baseline, candidate)
                elapsed_s, elapsed_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
                other_s = _busy_s() - busy_s - elapsed_cpu_s
            if turn:
                seconds[name].append(elapsed_s)
                cpu_seconds[name].append(elapsed_cpu_s)
            if name == "compare":
                others.append(max(other_s / elapsed_s, 0.0))
                peak_bytes = max(peak_bytes, peak[0])
    size_bytes = sum(path.stat().st_size for side in (baseline, candidate) for path in side.rglob("*.safetensors"))
    read_s, compare_s = (statistics.median(seconds[name]) for name in routes)
    read_cpu_s, compare_cpu_s = (statistics.median(cpu_seconds[name]) for name in routes)
    return Result(
        dtype=dtype_name(dtype),
        content=content,
        num_cores=num_threads(),
        read_and_subtract_s=read_s,
        compare_s=compare_s,
        read_and_subtract_cpu_s=read_cpu_s,
        compare_cpu_s=compare_cpu_s,
        gib_per_s=size_bytes / compare_s / 2**30,
        peak_bytes=peak_bytes,
        peak_tensors=peak_bytes / (_ROWS * _COLUMNS * dtype.itemsize),
        other_cores=statistics.median(others),
        ratio=read_s / compare_s,
        cpu_ratio=read_cpu_s / compare_cpu_s,
    )


def read_and_subtract(baseline: Path, candidate: Path) -> None:
    """Every stored tensor of both sides, subtracted; the largest |a - b| of each."""
    largest = 0.0
    for mine in sorted(baseline.rglob("*.safetensors")):
        with safe_open(mine, framework="pt") as left, safe_open(candidate / mine.relative_to(baseline), "pt") as right:
            for name in left.keys():  # noqa: SIM118 - it is no mapping
                largest = max(largest, float((left.get_tensor(name) - right.get_tensor(name)).abs_().max()))


def compare(baseline: Path, candidate: Path) -> None:
    """All of ``mock-scheduler compare``'s work on two traces."""
    with open_trace(baseline) as ours, open_trace(candidate) as theirs:
        found = compare_traces(ours, theirs, bounds=UNBOUNDED)
    if found.exceeding or found.findings or not found.differences:
        raise SystemExit(f"the traces must be equal to rounding: {found.exceeding[:1]} {found.findings[:1]}")


@contextmanager
def watch_memory() -> Iterator[list[int]]:
    """Gives a list whose only number is, afterwards, the largest growth of anonymous memory in the block, in bytes."""
    before, peak, has_ended = _anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not has_ended.wait(_SAMPLE_S):
            peak[0] = max(peak[0], _anonymous_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        has_ended.set()
        thread.join()


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _busy_s() -> float:
    """Reads the seconds that all cores together have worked since the machine started, another machine's share
    included.
    """
    counts = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = counts[3] + counts[4]
    return (sum(counts) - idle) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
