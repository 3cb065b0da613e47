"""Measures what grows with ranks and with size: ``python -m benchmarks.scale [PART ...] [--json results.json]``.

Each task runs in a process of its own. Seconds are of the processor (all threads), which a busy machine does not
stretch as it does the elapsed time; memory is anonymous (RssAnon), at its largest while the task runs, less that before
it; mapped files are not in it, since the system takes their pages back. *Slope*: by how much log(seconds) grows with
log(parts), from each size to the next; 1 is linear. Ranks are simulated: the library's own writers write their files,
one rank after another.

- *ranks*: traces of 64 ranks and more are opened and checked, merged, and compared, and one rank's file is taken away;
- *sketches*: the same ranks, with sketches;
- *large*: gradients in bfloat16 of a model with 8 billion parameters over tp8 × pp8 (``--layers`` of its 32 layers),
  an expert's and a vocabulary's tensor cut over 64 ranks, and 5,000 parameters in the distributed optimizer's ranges;
- *step*: a real step of ``--step-layers`` such layers in float32, its gradients traced and compared (16 bytes a
  parameter in memory, 4 on the disk);
- *curves*: memory of tracing, comparing, replaying and importing at four sizes;
- *recordings*: requests and bytes of ranks that replay one recording, in a folder and in an object store.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.scale.ranks import (
    Model,
    small_model,
    write_cut_tensor,
    write_large_model,
    write_many_ranks,
    write_ranges,
)
from benchmarks.scale.recordings import count_requests
from benchmarks.scale.step import take_steps
from benchmarks.scale.tasks import Figures, run_task
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.text import format_bytes

T = TypeVar("T")

PARTS = ("ranks", "sketches", "large", "step", "curves", "recordings")
_RANKS = (64, 256, 1024, 8192)
_CURVE_ROWS = (64, 128, 256, 512)
_CURVE_LAYERS = (8, 16, 32, 64)
_NUM_READERS = 64
_NUM_CUT_ROWS, _NUM_CUT_COLUMNS = 131_072, 2048
_NUM_PARAMETERS, _PARAMETER_NUMEL = 5000, 1000
_WIDTH = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One task at one size."""

    part: str
    task: str
    size: int
    figures: Figures
    slope: float | None = None


def main() -> None:
    """Measures the named parts, prints a table of each, and writes the figures to ``--json``."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--ranks", type=int, nargs="*", default=_RANKS)
    parser.add_argument("--layers", type=int, default=8, help="layers of the large model that are written")
    parser.add_argument("--step-layers", type=int, default=1, help="layers of the model that takes a real step")
    parser.add_argument("--folder", type=Path, default=None, help="where files are written; removed afterwards")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    measures: dict[str, Callable[[Path], list[Row]]] = {
        "ranks": lambda root: measure_ranks(root, arguments.ranks),
        "sketches": lambda root: measure_ranks(root, arguments.ranks, is_sketch=True),
        "large": lambda root: measure_large(root, arguments.layers),
        "step": lambda root: measure_step(root, arguments.step_layers),
        "curves": measure_curves,
    }
    content: dict[str, object] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="scale-") as name:
            if part == "recordings":
                content[part] = measure_recordings(Path(name))
                continue
            rows = measures[part](Path(name))
        print_rows(part, rows)
        content[part] = [asdict(row) for row in rows]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def run(task: str, folder: Path, size: int = 0) -> Figures:
    """Runs a task in a process of its own: memory that one has had would count for the next."""
    return in_child(run_task, task, folder, size)


def in_child(function: Callable[..., T], *arguments: object, **options: object) -> T:
    """Calls a function in a forked process; this one has imported all, and computes nothing before or after."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments, **options).result()


def measure_ranks(root: Path, sizes: Sequence[int], *, is_sketch: bool = False) -> list[Row]:
    """Measures traces of several numbers of ranks."""
    tasks = ("merge sketches",) if is_sketch else ("open", "merge", "compare", "missing rank")
    found = []
    for num_ranks in sizes:
        folder = root / f"{num_ranks}"
        in_child(write_many_ranks, folder, num_ranks=num_ranks, is_sketch=is_sketch)
        for task in tasks:
            found.append(
                Row(part="sketches" if is_sketch else "ranks", task=task, size=num_ranks, figures=run(task, folder))
            )
    return with_slopes(found)


def measure_large(root: Path, num_layers: int) -> list[Row]:
    """Measures the traces of a large model, of tensors cut over many ranks, and of many flat ranges."""
    model = Model(num_layers=num_layers)
    rows, columns = _NUM_CUT_ROWS, _NUM_CUT_COLUMNS
    expert, vocabulary = "decoder.layers.0.mlp.experts.linear_fc1.weight", "embedding.word_embeddings.weight"
    cut = (rows - 37, columns)
    cases: Sequence[tuple[str, int, Callable[..., None], dict[str, object]]] = (
        ("ranges", _NUM_PARAMETERS, write_ranges, {"num_parameters": _NUM_PARAMETERS, "numel": _PARAMETER_NUMEL}),
        ("expert", rows * columns, write_cut_tensor, {"name": expert, "shape": (rows, columns)}),
        ("vocabulary", math.prod(cut), write_cut_tensor, {"name": vocabulary, "shape": cut, "padded_rows": 37}),
        ("model", model.num_parameters, write_large_model, {"model": model}),
    )
    found = []
    for name, size, write, options in cases:
        folder = root / name
        in_child(write, folder, **options)
        found += [Row(part="large", task=f"{task} {name}", size=size, figures=run(task, folder)) for task in _READING]
    return found


_READING = ("merge", "compare")


def measure_step(root: Path, num_layers: int) -> list[Row]:
    """Measures a real step of a large model, and the reading of its gradients."""
    folder = root / "step"
    size, steps = in_child(take_steps, folder, num_layers)
    found = [Row(part="step", task=task, size=size, figures=figures) for task, figures in steps.items()]
    return found + [Row(part="step", task=task, size=size, figures=run(task, folder)) for task in _READING]


def measure_curves(root: Path) -> list[Row]:
    """Measures memory against size; traces have more and more tensors of one size, batches more and more rows."""
    found = []
    for num_layers in _CURVE_LAYERS:
        folder = root / f"trace-{num_layers}"
        model = small_model(num_layers)
        written = run("write trace", folder, model.num_layers)
        found += [
            Row(part="curves", task="trace", size=model.num_parameters, figures=written),
            Row(part="curves", task="compare", size=model.num_parameters, figures=run("compare", folder)),
        ]
    for num_rows in _CURVE_ROWS:
        folder = root / f"rows-{num_rows}"
        run("write recording", folder / "recording", num_rows)
        run("write batches", folder, num_rows)
        found += [
            Row(part="curves", task="replay", size=num_rows, figures=run("replay", folder / "recording")),
            Row(part="curves", task="import", size=num_rows, figures=run("import", folder)),
        ]
    return with_slopes(found)


def with_slopes(rows: Iterable[Row]) -> list[Row]:
    """Gives each row the slope from the size before of the same task."""
    found: list[Row] = []
    for row in rows:
        before = next((item for item in reversed(found) if item.task == row.task), None)
        slope = None
        if before is not None and before.figures.cpu_s and row.figures.cpu_s:
            slope = math.log(row.figures.cpu_s / before.figures.cpu_s) / math.log(row.size / before.size)
        found.append(Row(part=row.part, task=row.task, size=row.size, figures=row.figures, slope=slope))
    return sorted(found, key=lambda item: (item.task, item.size))


def measure_recordings(root: Path) -> list[dict[str, object]]:
    """Counts the requests and bytes of some of 64 ranks, and prints them."""
    table = Table(title=f"{_NUM_READERS} ranks replay one recording of 8 steps")
    for header in ("rows", "place", "rank", "requests to open", "to load", "bytes to open", "to load"):
        table.add_column(header, justify="right")
    found: list[dict[str, object]] = []
    for is_sharded in (False, True):
        ranks = (0, 1, _NUM_READERS - 1)
        for item in count_requests(root / f"sharded-{is_sharded}", ranks, _NUM_READERS, is_sharded=is_sharded):
            found.append({"is_sharded": is_sharded, **asdict(item)})
            table.add_row(
                "own" if is_sharded else "all",
                item.place,
                str(item.rank),
                *(f"{number:,}" for number in (item.num_opening, item.num_loading)),
                *(f"{number:,}" for number in (item.opening_bytes, item.loading_bytes)),
            )
    Console().print(table)
    return found


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Prints a table for a person."""
    table = Table(title=title)
    for header in ("task", "size", "CPU", "slope", "elapsed", "memory", "handles", "maps", "opens", "note"):
        table.add_column(header, justify="left" if header in ("task", "note") else "right")
    for row in rows:
        figures = row.figures
        table.add_row(
            row.task,
            f"{row.size:,}",
            f"{figures.cpu_s:.2f} s",
            "" if row.slope is None else f"{row.slope:.2f}",
            f"{figures.seconds:.2f} s",
            format_bytes(figures.peak_bytes),
            *(str(number) for number in (figures.handles, figures.maps, figures.opens)),
            figures.note,
        )
    Console(width=_WIDTH).print(table)


if __name__ == "__main__":
    main()
