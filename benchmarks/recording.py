"""Recording against ``torch.save`` and the pickle route of the same batch, side by side in one run.

The batch is that of an agentic run: seven tensors padded to 128 × 8,192 with a mean length of 700 tokens (35.7 MB).
The pickle route is ``torch.save`` into a buffer that is pickled to a file, as ROLL's rollout mock does.

Every time is a median of calls in several turns. In its turn a route runs again and again, after one call that is not
counted, so that it finds its own code and data in the processor's caches and not those of the route before it; the
turns alternate, so that a slow moment of the machine hits all alike. Ratios are what counts. All files are in the page
cache. What is loaded from the recording:

- *jagged, core*: the batch that training consumes, of a recording that holds nothing else;
- *jagged*: the same with what the codec keeps beside it, from which the padded tensors come back bit for bit;
- *padded*: these tensors. Their padding of zeros is memory that the system hands out when it is first touched; *padded,
  every value read* also reads all of it once, as it does for the pickle route;
- *rows of shard*: one rank's rows of the core batch, as the others from opening the file on.

Each load verifies every digest of the bytes it needs, the header's included. The reader is one that has opened the step
before, as a run does when it checks its plan: it takes up again what it found in a header of the very same bytes.

    python -m benchmarks.recording [--rounds 60] [--json results.json] [--no-scaling] [--peers PYTHON]

``--peers`` adds verl's ``DataProto`` and TransferQueue, in the environment of that interpreter (``recording_peers``).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.recording_peers import measure_peers
from mock_scheduler.adapters.padded import ROLL_AGENTIC, PaddedCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.arguments import ArgumentParser

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
GROUP_SIZE = 8
CODEC = PaddedCodec(ROLL_AGENTIC, sampling=SAMPLING, group_size=GROUP_SIZE)

Padded = dict[str, object]

_NUM_TURNS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the design: ``value`` must be at least, or at most, ``bound``."""

    name: str
    value: float
    bound: float
    is_floor: bool = True

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_floor else self.value <= self.bound


def make_padded(num_rows: int, width: int, *, mean_length: int, seed: int = 0) -> Padded:
    """A batch as ROLL's agentic scheduler makes it: five turns per row, of which the policy samples the second half."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(mean_length // 2, mean_length + mean_length // 2, (num_rows,), generator=generator)
    positions = torch.arange(width).expand(num_rows, width)
    inside = positions < lengths[:, None]
    turn_length = (lengths // 5).clamp(min=2)[:, None]
    is_sampled = inside & (positions % turn_length >= turn_length // 2)
    logprobs = torch.rand(num_rows, width - 1, generator=generator).neg_()
    scores = torch.zeros(num_rows, width)
    scores[torch.arange(num_rows), lengths - 1] = torch.rand(num_rows, generator=generator)
    return {
        "input_ids": torch.randint(1, 150_000, (num_rows, width), generator=generator) * inside,
        "attention_mask": inside.long(),
        "position_ids": positions * inside,
        "response_mask": is_sampled,
        "prompt_mask": inside & (positions < turn_length // 2),
        "scores": scores,
        "infer_logprobs": logprobs * is_sampled[:, 1:],
        "env_ids": list(range(num_rows)),
        "group_ids": [row // GROUP_SIZE for row in range(num_rows)],
        "tags": ["SimpleSokoban"] * num_rows,
    }


def request(num_rows: int, step: int = 0) -> RolloutRequest:
    return RolloutRequest(global_step=step, batch_size=num_rows, policy_version=step)


def info(writer: RecordingWriter, step: int) -> StepInfo:
    return StepInfo(step=step, mode="train", scheduler_id="default", run_id=writer.run_id, policy_version=step)


def open_writer(folder: Path, *, background: bool) -> RecordingWriter:
    return open_recording(
        str(folder),
        contract=Contract([]),
        plan=(),
        provenance={},
        resume=False,
        options=WriterOptions(background=background),
    )


def measure_ms(routes: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of ``rounds`` calls of each route, in turns as the module's docstring says."""
    times: dict[str, list[float]] = {name: [] for name in routes}
    num_turns = min(rounds, _NUM_TURNS)
    for turn in range(num_turns):
        for name in list(routes) if turn % 2 else list(reversed(routes)):
            routes[name]()
            for _ in range(rounds * (turn + 1) // num_turns - rounds * turn // num_turns):
                started_s = time.perf_counter()
                routes[name]()
                times[name].append((time.perf_counter() - started_s) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def read_all(batch: object) -> None:
    """Read every value of every tensor once."""
    for value in cast("Padded", batch).values():
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).max()


def save_pickle_route(padded: Padded, path: Path) -> None:
    """Saves as ROLL's rollout mock does: ``torch.save`` of the batch into a buffer, pickled to the file."""
    buffer = io.BytesIO()
    torch.save(padded, buffer)
    with path.open("wb") as file:
        pickle.dump(buffer.getvalue(), file, protocol=pickle.HIGHEST_PROTOCOL)


def load_pickle_route(path: Path) -> object:
    """The inverse, with ``weights_only=False`` as ROLL has it."""
    with path.open("rb") as file:
        return torch.load(io.BytesIO(pickle.load(file)), weights_only=False)


def peak_mib(work: Callable[[], object]) -> float:
    """Measures the memory that ``work`` needs at its peak beyond the present, in MiB, in a forked child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status_kib("VmRSS")
        work()
        os.write(write_end, str(_status_kib("VmHWM") - before).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        kib = int(pipe.read())
    os.waitpid(child, 0)
    return kib / 1024


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


class Comparison:
    """One batch stored by all three routes in one folder."""

    def __init__(self, folder: Path, *, num_rows: int, width: int, mean_length: int) -> None:
        self.num_rows = num_rows
        folder.mkdir(exist_ok=True)
        self.padded = make_padded(num_rows, width, mean_length=mean_length)
        self.batch = CODEC.encode(self.padded, request(num_rows))
        self.folder = folder
        self.torch_path, self.pickle_path = folder / "batch.pt", folder / "batch.pkl"
        torch.save(self.padded, self.torch_path)
        save_pickle_route(self.padded, self.pickle_path)
        with closing(open_writer(folder / "recording", background=False)) as writer:
            self.step_path = Path(writer.write_step(self.batch, info(writer, 0)).path)
        self.core = replace(self.batch, extras={}, meta={})
        with closing(open_writer(folder / "core", background=False)) as writer:
            writer.write_step(self.core, info(writer, 0))

    def check(self) -> None:
        """Checks that the content is the same: decoded from the recording it equals the padded batch bit for bit."""
        assert self._load("core").is_identical(self.core), "the core batch came back otherwise"
        decoded = CODEC.decode(self._load("recording"))
        for name, value in self.padded.items():
            found = decoded[name]
            is_equal = torch.equal(value, found) if isinstance(value, torch.Tensor) else list(value) == list(found)
            assert is_equal, f"{name} came back otherwise"

    def _load(self, name: str) -> RolloutBatch:
        return RecordingReader(str(self.folder / name)).open_step(request(self.num_rows)).load()

    def sizes(self) -> dict[str, int]:
        """Bytes of each route's file."""
        paths = {"torch.save": self.torch_path, "pickle": self.pickle_path, "recording": self.step_path}
        return {name: path.stat().st_size for name, path in paths.items()}

    def write_times(self, rounds: int) -> dict[str, float]:
        """How long the training loop is kept waiting: the whole call, or ``submit`` with an idle writer."""
        writers: list[RecordingWriter] = []
        blocked: dict[str, list[float]] = {"submit": [], "encode padded + submit": []}
        for index in range(rounds):
            writer = open_writer(self.folder / f"w{index}", background=True)
            writers.append(writer)
            for step, name in enumerate(blocked):
                started_s = time.perf_counter()
                batch = self.batch if name == "submit" else CODEC.encode(self.padded, request(self.num_rows, step))
                writer.submit(batch, info(writer, step))
                blocked[name].append((time.perf_counter() - started_s) * 1e3)
                writer.flush()
            writer.close()
        foreground = measure_ms(
            {
                "torch.save": lambda: torch.save(self.padded, self.torch_path),
                "pickle": lambda: save_pickle_route(self.padded, self.pickle_path),
            },
            rounds,
        )
        return {**foreground, **{name: statistics.median(values) for name, values in blocked.items()}}

    def load_times(self, rounds: int) -> dict[str, float]:
        """Times the way from the file to each of the forms in the module's docstring."""
        reader, core_reader = (RecordingReader(str(self.folder / name)) for name in ("recording", "core"))
        wanted = request(self.num_rows)
        shard = RowShard(index=3, count=8)
        return measure_ms(
            {
                "pickle": lambda: load_pickle_route(self.pickle_path),
                "torch.load": lambda: torch.load(self.torch_path, weights_only=False),
                "jagged, core": lambda: core_reader.open_step(wanted).load(),
                "jagged": lambda: reader.open_step(wanted).load(),
                "jagged, not verified again": lambda: reader.open_step(wanted).load(verify=False),
                "padded": lambda: CODEC.decode(reader.open_step(wanted).load()),
                "pickle, every value read": lambda: read_all(load_pickle_route(self.pickle_path)),
                "padded, every value read": lambda: read_all(CODEC.decode(reader.open_step(wanted).load())),
                "rows of shard 3 of 8": lambda: core_reader.open_step(wanted).load(shard),
            },
            rounds,
        )

    def peaks(self) -> dict[str, float]:
        """Peak memory of writing and loading, beyond the batch itself, in MiB."""
        reader = RecordingReader(str(self.folder / "recording"))
        wanted = request(self.num_rows)

        def write() -> None:
            with closing(open_writer(self.folder / "peak", background=True)) as writer:
                writer.submit(self.batch, info(writer, 0))

        return {
            "write torch.save": peak_mib(lambda: torch.save(self.padded, self.folder / "peak.pt")),
            "write pickle": peak_mib(lambda: save_pickle_route(self.padded, self.folder / "peak.pkl")),
            "write recording": peak_mib(write),
            "load torch.load": peak_mib(lambda: torch.load(self.torch_path, weights_only=False)),
            "load pickle": peak_mib(lambda: load_pickle_route(self.pickle_path)),
            "load recording": peak_mib(lambda: reader.open_step(wanted).load()),
            "load shard 3 of 8": peak_mib(lambda: reader.open_step(wanted).load(RowShard(index=3, count=8))),
        }


def bars_of(sizes: dict[str, int], write: dict[str, float], load: dict[str, float]) -> list[Bar]:
    """The design's bars for 128 × 8,192 with a mean length of 700."""
    least_foreground = min(write["torch.save"], write["pickle"])
    return [
        Bar(name="file size: times smaller than torch.save", value=sizes["torch.save"] / sizes["recording"], bound=30),
        Bar(name="file size: times smaller than pickle", value=sizes["pickle"] / sizes["recording"], bound=30),
        Bar(name="blocked: times shorter than the quicker of both", value=least_foreground / write["submit"], bound=10),
        Bar(name="load jagged: times faster than pickle", value=load["pickle"] / load["jagged"], bound=20),
        Bar(name="load jagged: times faster than torch.load", value=load["torch.load"] / load["jagged"], bound=5),
        Bar(name="load jagged, core: times faster than pickle", value=load["pickle"] / load["jagged, core"], bound=20),
        Bar(name="load padded: times faster than pickle", value=load["pickle"] / load["padded"], bound=2),
        Bar(name="rows of a shard: ms", value=load["rows of shard 3 of 8"], bound=1, is_floor=False),
    ]


def scaling(folder: Path, rounds: int) -> list[tuple[str, dict[str, float]]]:
    """Measures how times grow with rows, with the ranks that share a step, and with the steps of a recording."""
    results: list[tuple[str, dict[str, float]]] = []
    for num_rows in (32, 128, 512):
        case = Comparison(folder / f"rows{num_rows}", num_rows=num_rows, width=2048, mean_length=700)
        results.append((f"{num_rows} rows × 2,048", {**case.write_times(3), **case.load_times(rounds)}))
    case = Comparison(folder / "ranks", num_rows=512, width=2048, mean_length=700)
    reader = RecordingReader(str(folder / "ranks" / "recording"))
    for count in (1, 2, 4, 8, 16):
        shard = RowShard(index=count - 1, count=count)
        routes = {"one rank's rows": lambda shard=shard: reader.open_step(request(512)).load(shard)}
        results.append((f"512 rows on {count} ranks", measure_ms(routes, rounds)))
    for num_steps in (4, 32, 128):
        target = folder / f"steps{num_steps}"
        with closing(open_writer(target, background=True)) as writer:
            for step in range(num_steps):
                writer.submit(case.batch, info(writer, step))
        plan = [request(512, step) for step in range(num_steps)]
        routes = {
            "open and check headers": lambda t=target, p=plan: RecordingReader(str(t)).check_plan(p),
            "open and verify all": lambda t=target, p=plan: RecordingReader(str(t)).check_plan(p, verify=True),
        }
        results.append((f"{num_steps} steps of 512 rows", measure_ms(routes, 3)))
    return results


def print_times(console: Console, title: str, values: dict[str, float], *, unit: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("route")
    table.add_column(unit, justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:,.2f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 where every bar is met, else 1."""
    parser = ArgumentParser(prog="benchmarks.recording", description="Recording against torch.save and pickle")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    parser.add_argument("--peers", type=Path, help="interpreter of an environment with verl and TransferQueue")
    parser.add_argument("--no-scaling", action="store_true", help="only the bars")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="recording-benchmark-") as folder:
        root = Path(folder)
        case = Comparison(root / "bars", num_rows=128, width=8192, mean_length=700)
        case.check()
        peaks = case.peaks()
        sizes, write, load = (
            case.sizes(),
            case.write_times(max(3, options.rounds // 4)),
            case.load_times(options.rounds),
        )
        peers = {} if options.peers is None else measure_peers(options.peers, case.torch_path, options.rounds // 4)
        grown = [] if options.no_scaling else scaling(root, max(3, options.rounds // 10))
    print_times(console, "File", {name: size / 1e6 for name, size in sizes.items()}, unit="MB")
    print_times(console, "Training loop blocked by one step", write, unit="ms")
    print_times(console, "Load one step, file in the page cache", load, unit="ms")
    print_times(console, "Peak memory beyond the batch itself", peaks, unit="MiB")
    for name, values in peers.items():
        print_times(console, f"In the peers' process: {name}", values, unit="")
    for title, values in grown:
        print_times(console, title, values, unit="ms")
    bars = bars_of(sizes, write, load)
    table = Table(title="Bars", title_justify="left")
    for heading in ("what", "measured", "bar", "met"):
        table.add_column(heading)
    for bar in bars:
        sign = "≥" if bar.is_floor else "≤"
        table.add_row(bar.name, f"{bar.value:.2f}", f"{sign} {bar.bound:g}", "yes" if bar.is_met else "NO")
    console.print(table)
    if options.json is not None:
        content = {
            "sizes_bytes": sizes,
            "write_ms": write,
            "load_ms": load,
            "peak_mib": peaks,
            "scaling": dict(grown),
            "peers": peers,
            "bars": {bar.name: bar.value for bar in bars},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
