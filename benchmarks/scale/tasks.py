"""The tasks that are measured, and what each of them takes; each is run in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.scale.ranks import small_model, write_large_model
from benchmarks.scale.recordings import import_batches, replay, write_batches, write_recording
from mock_scheduler.comparison.bounds.bounds import UNBOUNDED
from mock_scheduler.comparison.walk.traces import compare_traces
from mock_scheduler.errors import TraceError
from mock_scheduler.run_folder.inputs import open_inputs
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.sketch.reader import open_sketches

_SAMPLE_S = 0.01


@dataclass(kw_only=True, slots=True)
class Figures:
    """What a task took. cpu_s: of all threads. peak_bytes: growth of anonymous memory (RssAnon), at its largest.

    handles, maps: open file descriptors and mapped files, at their most. opens: files of the task's folder opened.
    read_bytes: that the process asked the system for; what it reads through maps is not in it.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    handles: int = 0
    maps: int = 0
    opens: int = 0
    read_bytes: int = 0
    note: str = ""


@dataclass(kw_only=True)
class _Watch:
    folder: str
    figures: Figures = field(default_factory=Figures)
    before_bytes: int = 0

    def sample(self) -> None:
        """Takes one sample of memory, handles and maps."""
        figures = self.figures
        figures.peak_bytes = max(figures.peak_bytes, anonymous_bytes() - self.before_bytes)
        figures.handles = max(figures.handles, len(os.listdir("/proc/self/fd")))
        text = Path("/proc/self/maps").read_text(errors="replace")
        figures.maps = max(figures.maps, text.count(self.folder))

    def on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        """Counts the files that are opened in the folder."""
        if event == "open" and str(arguments[0]).startswith(self.folder):
            self.figures.opens += 1


@contextmanager
def watch(folder: Path) -> Iterator[Figures]:
    """Measures the block."""
    watched, has_ended = _Watch(folder=str(folder), before_bytes=anonymous_bytes()), threading.Event()

    def sample() -> None:
        while not has_ended.wait(_SAMPLE_S):
            watched.sample()

    sys.addaudithook(watched.on_event)
    thread = threading.Thread(target=sample)
    thread.start()
    started_s, cpu_s, read_bytes = time.perf_counter(), time.process_time(), _read_bytes()
    try:
        yield watched.figures
    finally:
        watched.figures.seconds = time.perf_counter() - started_s
        watched.figures.cpu_s = time.process_time() - cpu_s
        watched.figures.read_bytes = _read_bytes() - read_bytes
        has_ended.set()
        thread.join()


def anonymous_bytes() -> int:
    """Reads RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def open_(folder: Path) -> str:
    """Opens a trace: reads every header, and checks that the ranks fit together."""
    with open_trace(folder) as trace:
        return f"{len(trace.keys(0))} tensors"


def merge(folder: Path) -> str:
    """Opens a trace and merges every tensor, one after another."""
    with open_trace(folder) as trace:
        return f"{sum(trace.merge(key).tensor.nbytes for key in sorted(trace.keys(0), key=str))} bytes"


def compare(folder: Path) -> str:
    """Compares a trace with itself: opens it twice, and reads both sides."""
    with open_trace(folder) as ours, open_trace(folder) as theirs:
        found = compare_traces(ours, theirs, bounds=UNBOUNDED)
    faults = [*found.findings, *found.unusable]
    if faults or not all(difference.bit_equal for difference in found.differences):
        raise SystemExit(f"a trace must be finite, and equal to itself: {faults[:1]}")
    return f"{len(found.differences)} tensors"


def merge_sketches(folder: Path) -> str:
    """Opens a trace of sketches and adds up every tensor."""
    trace = open_sketches(folder)
    return f"{sum(trace.sketch(key).sketch.num_elements for key in trace.keys(0))} elements"


def missing(folder: Path) -> str:
    """Opens a trace in which one rank has no file, beside a whole one, as ``compare`` does."""
    path = max((folder / "step_000000").glob("rank_*"))
    aside = path.rename(folder / path.name)
    try:
        open_inputs((folder, folder.parent))
    except TraceError as error:
        return str(error).split("\n")[0]  # the second line is of the folder that stands for another side
    finally:
        aside.rename(path)
    raise SystemExit("a missing rank was not found")


_TASKS: Mapping[str, Callable[[Path], str]] = {
    "open": open_,
    "merge": merge,
    "compare": compare,
    "merge sketches": merge_sketches,
    "missing rank": missing,
    "replay": replay,
    "import": import_batches,
}
_PREPARATIONS: Mapping[str, Callable[[Path, int], None]] = {
    "write trace": lambda folder, num_layers: write_large_model(folder, small_model(num_layers)),
    "write recording": write_recording,
    "write batches": write_batches,
}


def run_task(name: str, folder: Path, size: int = 0) -> Figures:
    """Runs a task in a folder and gives what it took; ``size``: of what it writes."""
    with watch(folder) as figures:
        if name in _PREPARATIONS:
            _PREPARATIONS[name](folder, size)
        else:
            figures.note = _TASKS[name](folder)
    return figures
