"""Long and remote recordings, and traces in a bucket: what they take, and what compression blocks.

The bucket is an HTTP server of this machine's loopback, in a process of its own, that speaks as much of S3 as s3fs
asks: each answer comes after a latency of 50 ms, and one request of a hundred, drawn with a seed, is ``503 SlowDown``.

- *Run*: mock steps of 128 rows (mean length 700) with updates of 300 ms between them, in which this process sleeps.
  The time that calls wait for a step to be read is given in parts of the updates' time: from a folder, and from the
  bucket with steps read ahead and without, and where a process of this node, or the check before the run, has fetched
  them already.
- *Opening*: ``build_scheduler`` with a plan of every step, for recordings of 100, 10,000 and 100,000 steps, in a folder
  and in the bucket (without failures, so that each is comparable). Most files of the long ones are links to one:
  opening reads the first and the last steps only.
- *Traces*: one comparison of traces of simulated ranks, in a folder, in the bucket, and there again where this node has
  kept their parts.
- *Blocked*: how long ``submit`` keeps the training, in turn with a plain and with a compressing writer, each idle.

    python -m benchmarks.remote [--steps 60] [--rounds 15] [--no-opening] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from benchmarks.recording import CODEC, info, make_padded, request
from benchmarks.scale.ranks import write_many_ranks
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.proxy import read_ahead
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.routing import Router
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.reader import MOST_CHECKED, RecordingReader
from mock_scheduler.recording.step.step_file import encode_step
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.node_cache import FOLDER_VARIABLE, LIMIT_VARIABLE
from mock_scheduler.verdict.compare_runs import compare_paths

BUCKET = "recordings"
LATENCY_S = 0.05
FAILURE_RATE = 0.01
UPDATE_S = 0.3
SIZES = (100, 10_000, 100_000)
NUM_RANKS = (64, 512)
_PAGE = 1000


class _Store(ThreadingHTTPServer):
    """Serves the files below ``root`` as one bucket, to be read."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, *, failure_rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.failure_rate = failure_rate
        self.draws = random.Random(0)
        self.names: dict[str, list[str]] = {}
        self.count = 0
        self.guard = threading.Lock()

    def draw_failure(self) -> bool:
        """Count a request; whether it fails."""
        with self.guard:
            self.count += 1
            return self.draws.random() < self.failure_rate

    def list_folder(self, folder: str) -> list[str]:
        """Names in a folder, folders with ``/`` after them; listed once."""
        with self.guard:
            if folder not in self.names:
                place = self.root / folder
                found = os.scandir(place) if place.is_dir() else ()
                self.names[folder] = sorted(item.name + "/" * item.is_dir() for item in found)
            return self.names[folder]


class _Handler(BaseHTTPRequestHandler):
    """Answers ``GET`` and ``HEAD`` of an object, and ``ListObjectsV2``."""

    protocol_version = "HTTP/1.1"
    server: _Store

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/count":
            return self._answer(200, str(self.server.count).encode())
        fails = self.server.draw_failure()
        time.sleep(LATENCY_S)
        if fails:
            return self._answer(
                503, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
            )
        parts = urlsplit(self.path)
        name = unquote(parts.path).removeprefix(f"/{BUCKET}").strip("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if "list-type" in query:
            return self._answer(200, self._list(query))
        path = self.server.root / name
        if not path.is_file():
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self._answer(200, data)
        start, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        return self._answer(206, data[start : last + 1], {"Content-Range": f"bytes {start}-{last}/{len(data)}"})

    def _list(self, query: dict[str, str]) -> bytes:
        folder, _, begin = query.get("prefix", "").rpartition("/")
        names = [name for name in self.server.list_folder(folder) if name.startswith(begin)]
        start = int(query.get("continuation-token", "0"))
        page = names[start : start + _PAGE]
        prefix = f"{folder}/" if folder else ""
        items = [
            f"<CommonPrefixes><Prefix>{escape(prefix + name)}</Prefix></CommonPrefixes>"
            if name.endswith("/")
            else f"<Contents><Key>{escape(prefix + name)}</Key><Size>{self._size(prefix + name)}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name in page
        ]
        is_cut = start + _PAGE < len(names)
        token = f"<NextContinuationToken>{start + _PAGE}</NextContinuationToken>" if is_cut else ""
        head = f"<Name>{BUCKET}</Name><KeyCount>{len(page)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        return f"<ListBucketResult>{head}{token}{''.join(items)}</ListBucketResult>".encode()

    def _size(self, name: str) -> int:
        return (self.server.root / name).stat().st_size

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"x"', **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Bucket:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def count(self) -> int:
        """Requests so far."""
        from urllib.request import urlopen

        with urlopen(f"{self.endpoint}/count") as answer:
            return int(answer.read())


@contextmanager
def serve(root: Path, *, failure_rate: float) -> Iterator[Bucket]:
    """A bucket of the files in ``root``; s3fs finds it by this process's environment."""
    import fsspec

    command = [sys.executable, "-m", "benchmarks.remote", "--serve", str(root), "--failures", str(failure_rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        bucket = Bucket(int(process.stdout.readline()))
        os.environ |= {
            "AWS_ENDPOINT_URL": bucket.endpoint,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield bucket
    finally:
        process.kill()
        process.wait()


def make_batch(num_rows: int, mean_length: int) -> RolloutBatch:
    """The batch that training consumes."""
    padded = make_padded(num_rows, 2 * mean_length, mean_length=mean_length)
    return replace(CODEC.encode(padded, request(num_rows)), extras={}, meta={})


def record(folder: Path, batch: RolloutBatch, num_steps: int) -> None:
    """A recording whose first and last steps are whole; most others are links to one of them."""
    with closing(_open_writer(folder, "none", background=False)) as writer:
        target = Path(writer.write_step(batch, info(writer, 0)).path)
        for step in range(1, num_steps):
            path = folder / f"train/step_{step:06d}.safetensors"
            # A file takes 65,000 links.
            if MOST_CHECKED <= step < num_steps - MOST_CHECKED and step % 50_000:
                os.link(target, path)
            else:
                path.write_bytes(encode_step(batch, info(writer, step)).to_bytes())
                target = path


def _open_writer(folder: Path, compression: str, *, background: bool = True):  # noqa: ANN202 - a RecordingWriter
    options = WriterOptions(compression="zstd" if compression == "zstd" else "none", background=background)
    return open_recording(str(folder), contract=Contract([]), plan=(), provenance={}, resume=False, options=options)


def open_run(location: str, plan: Sequence[RolloutRequest]) -> ProxyScheduler:
    """The scheduler of a mock run."""
    return build_scheduler(_mock_config(location), _never, Contract([]), plan=plan)


def _mock_config(location: str) -> RolloutMockConfig:
    return RolloutMockConfig(enable=True, mode="mock", dump_dir=location)


def _never() -> object:
    raise AssertionError("a mock run builds no scheduler")


class Place(NamedTuple):
    """Where a run reads from: how many steps are read ahead, and how many GiB are kept on the node."""

    location: str
    num_ahead: int
    kept_gib: int


def run_times(places: dict[str, Place], plan: Sequence[RolloutRequest]) -> dict[str, dict[str, float]]:
    """What waiting for batches adds to the updates, by place.

    Each step is asked of every place in turn, with a part of an update after each, so that a slow moment of the machine
    hits all alike: between two calls to one place lies the time of an update, and whatever the others take.
    """
    waits_s: dict[str, list[float]] = {name: [] for name in places}
    reading_s: dict[str, list[float]] = {name: [] for name in places}
    with ExitStack() as stack:
        clock = stack.enter_context(_reading_clock())
        schedulers = {}
        for name, place in places.items():
            os.environ[LIMIT_VARIABLE] = str(place.kept_gib)
            schedulers[name] = stack.enter_context(open_run(place.location, plan))
        for item in plan:
            for name, place in places.items():
                read_ahead._NUM_STEPS = place.num_ahead
                started_s, clock[:] = time.perf_counter(), [0.0]
                schedulers[name].get_batch(item)
                waits_s[name].append(time.perf_counter() - started_s)
                reading_s[name].append(clock[0])
                time.sleep(UPDATE_S / len(places))
    # The first step is read before any update.
    return {
        name: {
            "median wait, ms": 1e3 * statistics.median(waits),
            "of it reading, ms": 1e3 * statistics.median(reading_s[name]),
            "longest reading, ms": 1e3 * max(reading_s[name][1:]),
            "reading, % of the updates": 100 * sum(reading_s[name][1:]) / ((len(plan) - 1) * UPDATE_S),
        }
        for name, waits in waits_s.items()
    }


@contextmanager
def _reading_clock() -> Iterator[list[float]]:
    """Adds up the seconds that calls wait for a step to be read, here or ahead; the rest is the check of its rows."""
    total_s = [0.0]

    def timed(owner: type, name: str, patch: ExitStack) -> None:
        method = getattr(owner, name)

        def run(*arguments: object, **named: object) -> object:
            started_s = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                total_s[0] += time.perf_counter() - started_s

        setattr(owner, name, run)
        patch.callback(setattr, owner, name, method)

    with ExitStack() as patch:
        timed(RecordingReader, "load_step", patch)
        timed(read_ahead.ReadAhead, "take", patch)
        yield total_s


def open_times(location: str, bucket: Bucket | None) -> dict[str, dict[str, float]]:
    """What opening takes with a plan of every step; of it, what the plan takes that knows of no recording."""
    found = {}
    for size in SIZES:
        plan = [request(8, step) for step in range(size)]
        num_before = 0 if bucket is None else bucket.count()
        started_s = time.perf_counter()
        Router(_mock_config(location), plan, {})
        routed_s, routed_cpu_s = time.perf_counter(), time.process_time()
        scheduler = open_run(f"{location}/{size}", plan)
        opened_s, opened_cpu_s = time.perf_counter(), time.process_time()
        num_requests = 0 if bucket is None else bucket.count() - num_before
        scheduler.close()
        found[f"{size:,} steps, {'folder' if bucket is None else 'bucket'}"] = {
            "open, s": opened_s - routed_s,
            "processor time of it, s": opened_cpu_s - routed_cpu_s,
            "its plan alone, s": routed_s - started_s,
            "requests": num_requests,
        }
    return found


def compare_times(root: Path, bucket: Bucket) -> dict[str, dict[str, float]]:
    """What a comparison of two equal traces takes."""
    found = {}
    for num_ranks in NUM_RANKS:
        names = [f"{side}{num_ranks}/trace" for side in "ab"]
        for name in names:
            write_many_ranks(root / name, num_ranks=num_ranks)
        local, remote = [str(root / name) for name in names], [f"s3://{BUCKET}/{name}" for name in names]
        for place, sides in {"folder": local, "bucket": remote, "bucket, again": remote}.items():
            num_before, started_s, started_cpu_s = bucket.count(), time.perf_counter(), time.process_time()
            compare_paths(*sides)
            found[f"{num_ranks} ranks, {place}"] = {
                "time, s": time.perf_counter() - started_s,
                "processor time, s": time.process_time() - started_cpu_s,
                "requests": bucket.count() - num_before,
            }
    return found


def blocked_ms(folder: Path, batch: RolloutBatch, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of ``submit``; the writer has written the step before."""
    times: dict[str, list[float]] = {"none": [], "zstd": []}
    cpu_times: dict[str, list[float]] = {name: [] for name in times}
    writers = {name: _open_writer(folder / name, name) for name in times}
    for step in range(rounds + 1):
        for name in list(writers) if step % 2 else list(reversed(writers)):
            writer = writers[name]
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            writer.submit(batch, info(writer, step))
            if step:
                times[name].append(1e3 * (time.perf_counter() - started_s))
                cpu_times[name].append(1e3 * (time.thread_time() - started_cpu_s))
            writer.flush()
    found = {}
    for name, writer in writers.items():
        writer.close()
        size = sum(path.stat().st_size for path in (folder / name / "train").iterdir())
        found[name] = {
            "median, ms": statistics.median(times[name]),
            "fastest, ms": min(times[name]),
            "processor time of the caller, ms": statistics.median(cpu_times[name]),
            "MB a step": size / (rounds + 1) / 1e6,
        }
    return found


def measure(root: Path, options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """All measurements, each by place."""
    batch = make_batch(128, 700)
    plan = [request(128, step) for step in range(options.steps)]
    record(root / "run", batch, options.steps)
    results: dict[str, dict[str, dict[str, float]]] = {}
    results["blocked"] = blocked_ms(root / "blocked", batch, options.rounds)
    places = {
        "folder": Place(str(root / "run"), 0, 0),
        "bucket, read ahead": Place(f"s3://{BUCKET}/run", read_ahead._NUM_STEPS, 0),
        "bucket, not read ahead": Place(f"s3://{BUCKET}/run", 0, 0),
        "bucket, kept, read ahead": Place(f"s3://{BUCKET}/run", read_ahead._NUM_STEPS, 16),
        "bucket, kept, not read ahead": Place(f"s3://{BUCKET}/run", 0, 16),
    }
    os.environ[FOLDER_VARIABLE] = str(root / "kept")
    with serve(root, failure_rate=FAILURE_RATE):
        results["run"] = run_times(places, plan)
    with serve(root, failure_rate=FAILURE_RATE) as bucket:
        results["traces"] = compare_times(root, bucket)
    if options.no_opening:
        return results
    small = make_batch(8, 32)
    os.environ[LIMIT_VARIABLE] = "16"
    for size in SIZES:
        record(root / str(size), small, size)
    results["opening"] = open_times(str(root), None)
    with serve(root, failure_rate=0.0) as bucket:
        results["opening"] |= open_times(f"s3://{BUCKET}", bucket)
    return results


def print_results(console: Console, results: dict[str, dict[str, dict[str, float]]]) -> None:
    """A table for each measurement."""
    for title, rows in results.items():
        table = Table("", *next(iter(rows.values())), title=title, title_justify="left")
        for name, values in rows.items():
            table.add_row(name, *(f"{value:,.4g}" for value in values.values()))
        console.print(table)
    console.print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or serve a bucket."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the run")
    parser.add_argument("--rounds", type=int, default=15, help="of the blocked time")
    parser.add_argument("--no-opening", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--failures", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        store = _Store(options.serve, failure_rate=options.failures)
        print(store.server_port, flush=True)
        store.serve_forever()
    with tempfile.TemporaryDirectory(prefix="remote-benchmark-") as folder:
        results = measure(Path(folder), options)
    print_results(Console(width=160), results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
