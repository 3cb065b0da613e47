"""Comparing two traces against reading the same files with safetensors and subtracting, side by side in one run.

Two traces of ``--gib`` each: gradients, parameters and activations of 64 MiB each, cut over two tensor-parallel ranks.
The third is the first with the rounding of another order of sums (one unit in the last place in every other element).
All files are in the page cache. *Read and subtract* opens both sides' files with safetensors, subtracts each pair of
stored tensors and takes the largest |a - b|: it checks no digest, merges nothing and computes one figure. *Compare*
checks every byte against its digest, merges the ranks' pieces, compares replicas and computes all figures.

Beside the elapsed time stands the processor's time of all cores, which a busy machine does not stretch as much. *Read
and subtract* is one loop, as a person would write it; torch may divide its operations among cores. The result says how
many cores there were, and how many of them other processes kept busy while comparing: with both idle, the ratio of the
elapsed times is what counts; else that of the processor's times says more, which however counts each of the threads of
*compare* in full.

Memory is what is resident beside the mapped files (RssAnon), at its largest while comparing, less what was before.

    python -m benchmarks.compare [--gib 2] [--rounds 3] [--folder DIR] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED
from mock_scheduler.comparison.measure.large_tensors import num_threads
from mock_scheduler.comparison.walk.traces import compare_traces
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.text import format_bytes
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split

_ROWS, _COLUMNS = 4096, 4096
_TENSOR_BYTES = _ROWS * _COLUMNS * 4
_NUM_RANKS = 2
_KINDS: tuple[TraceKind, ...] = ("activation", "initial", "gradient", "parameter")
_SAMPLE_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One pair of traces. Seconds are medians; ``ratio``: of the speeds of comparing and of reading and subtracting.

    ``other_cores``: cores that other processes, or other machines on the same hardware, kept busy while comparing.
    """

    content: str
    read_and_subtract_s: float
    compare_s: float
    read_and_subtract_cpu_s: float
    compare_cpu_s: float
    gib_per_s: float
    peak_bytes: int
    other_cores: float

    @property
    def ratio(self) -> float:
        """At least 0.5 is the bar."""
        return self.read_and_subtract_s / self.compare_s

    @property
    def cpu_ratio(self) -> float:
        """The same of the processor's time."""
        return self.read_and_subtract_cpu_s / self.compare_cpu_s

    @property
    def peak_tensors(self) -> float:
        """Peak memory in tensors."""
        return self.peak_bytes / _TENSOR_BYTES


def main() -> None:
    """Write the traces, measure, print a table, and write the figures to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of each trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the traces are written; removed afterwards")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    num_names = max(1, round(arguments.gib * 2**30 / (_TENSOR_BYTES * len(_KINDS))))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        traces = {name: Path(folder) / name for name in ("baseline", "equal", "rounding")}
        for name, path in traces.items():
            write_trace(path, num_names=num_names, is_rounded=name == "rounding")
        results = [
            measure(name, traces["baseline"], traces[name], rounds=arguments.rounds) for name in ("equal", "rounding")
        ]
    size_bytes = num_names * len(_KINDS) * _TENSOR_BYTES
    print_results(results, size_bytes)
    if arguments.json is not None:
        rows = [
            {**asdict(item), "ratio": item.ratio, "cpu_ratio": item.cpu_ratio, "peak_tensors": item.peak_tensors}
            for item in results
        ]
        content = {"size_bytes": size_bytes, "num_cores": num_threads(), "results": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def write_trace(path: Path, *, num_names: int, is_rounded: bool) -> None:
    """One step of ``num_names`` names, each of all kinds, on two ranks."""
    for rank in range(_NUM_RANKS):
        place = RankPlace(global_rank=rank, coordinates={"tp": rank})
        sink = FullSink(path, step=0, place=place, world_size=_NUM_RANKS)
        for number in range(num_names):
            for position, kind in enumerate(_KINDS):
                sink.add(
                    _make_entry(number, kind, seed=number * len(_KINDS) + position, rank=rank, is_rounded=is_rounded)
                )
        sink.close(StepFooter(ranks=tuple(range(_NUM_RANKS))))


def _make_entry(number: int, kind: TraceKind, *, seed: int, rank: int, is_rounded: bool) -> TraceEntry:
    values = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(seed))
    if is_rounded and kind != "initial":
        values.view(torch.int32).view(-1)[::2] ^= 1
    spec = ShardSpec(
        name=f"decoder.layers.{number}.mlp.linear_fc2.weight",
        global_shape=(_ROWS, _COLUMNS),
        local_shape=(_ROWS // _NUM_RANKS, _COLUMNS),
        splits=even_split(0, size=_ROWS, rank=rank, num_ranks=_NUM_RANKS),
    )
    return TraceEntry(update=0, kind=kind, spec=spec, tensor=cut_shard(values, spec), dims=("row", "column"))


def measure(content: str, baseline: Path, candidate: Path, *, rounds: int) -> Result:
    """Both routes in turns, after one of each that is not counted."""
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
    size_bytes = sum(path.stat().st_size for folder in (baseline, candidate) for path in folder.rglob("*.safetensors"))
    compare_s = statistics.median(seconds["compare"])
    return Result(
        content=content,
        read_and_subtract_s=statistics.median(seconds["read"]),
        compare_s=compare_s,
        read_and_subtract_cpu_s=statistics.median(cpu_seconds["read"]),
        compare_cpu_s=statistics.median(cpu_seconds["compare"]),
        gib_per_s=size_bytes / compare_s / 2**30,
        peak_bytes=peak_bytes,
        other_cores=statistics.median(others),
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


def print_results(results: list[Result], size_bytes: int) -> None:
    """A table for a person."""
    title = f"two traces of {format_bytes(size_bytes)}, tensors of {format_bytes(_TENSOR_BYTES)}, {num_threads()} cores"
    table = Table(title=title)
    for header in (
        "content",
        "read and subtract",
        "compare",
        "both sides",
        "speed ratio (bar 0.5)",
        "of CPU time",
        "cores busy with others",
        "memory",
    ):
        table.add_column(header, justify="left" if header == "content" else "right")
    for item in results:
        table.add_row(
            item.content,
            f"{item.read_and_subtract_s:.2f} s",
            f"{item.compare_s:.2f} s",
            f"{item.gib_per_s:.2f} GiB/s",
            f"{item.ratio:.2f}",
            f"{item.cpu_ratio:.2f}",
            f"{item.other_cores:.1f}",
            f"{format_bytes(item.peak_bytes)} ({item.peak_tensors:.1f} tensors)",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
