"""Kills attached runs at any moment and looks at what they leave: ``python -m ... FOLDER SEED COUNT``; prints problems.

The runs are forked from this process, which has imported everything, so that most of a run's time is its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.trace.full.reader import open_trace
from tests.megatron.attach.own_training import main as train

Bits = dict[str, bytes]


def start(folder: Path, name: str) -> int:
    """Forks a run of a case."""
    process_id = os.fork()
    if process_id:
        return process_id
    with (folder / f"{name}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 70
    try:
        train(folder, [name])
        code = int((folder / f"{name}.exit.0").read_text(encoding="utf-8"))
    finally:
        os._exit(code)
    return 0


def read_bits(trace: Path) -> Bits:
    """The bits of every tensor of the complete steps."""
    if not list(trace.glob("step_*")):
        return {}
    found: Bits = {}
    with open_trace(trace) as opened:
        for step in opened.steps:
            for key in opened.keys(step):
                tensor = opened.merge(key).tensor.contiguous()
                found[key.describe()] = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return found


def read_metrics(folder: Path) -> list[bytes]:
    """The lines that were written to their ends."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def find_problems(folder: Path, expected: Bits, lines: list[bytes]) -> Iterator[str]:
    """Yields what is torn or other than in a run that nobody ended."""
    try:
        found = read_bits(folder / "trace")
    except TraceError as error:
        if "no complete step" not in str(error) and "no rank file" not in str(error):
            yield f"trace: {error}"
        found = {}
    yield from (f"bits: {key}" for key, bits in found.items() if expected.get(key) != bits)
    left = read_metrics(folder)
    if left != lines[: len(left)]:
        yield f"metrics: {left}"
    for name in ("run.json", "start.json", "error.json", "ledger.json"):
        if (folder / name).exists() and not isinstance(json.loads((folder / name).read_bytes()), dict):
            yield name
    is_complete = (folder / "run.json").exists()
    if is_complete and (len(found), len(left)) != (len(expected), len(lines)):
        yield "run.json says completed, and something is missing"


def wait_for(path: Path, took_s: float) -> None:
    """Waits until a file of the run is there, for a few times as long as a whole run takes."""
    ends_s = time.monotonic() + 4 * took_s
    while not path.exists() and time.monotonic() < ends_s:
        time.sleep(0.001)


def main(folder: Path, seed: int, count: int) -> None:
    use_host_device()
    moments = random.Random(seed)
    expected: dict[str, tuple[Bits, list[bytes], float]] = {}
    (folder / "whole").mkdir(parents=True)
    for name in ("one", "again"):
        began_s = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(start(folder / "whole", name), 0)[1]) == 0
        took_s = time.monotonic() - began_s
        whole = folder / "whole" / name
        expected[name] = (read_bits(whole / "trace"), read_metrics(whole), took_s)
    stages: dict[int, int] = {}
    for number in range(count):
        own = folder / str(number)
        own.mkdir()
        name = "again" if number % 3 == 2 else "one"
        if name == "again":
            (own / "one").symlink_to(folder / "whole" / "one")
        bits, lines, took_s = expected[name]
        process_id = start(own, name)
        if number % 4:  # the rest of the time goes to building the model
            wait_for(own / name / moments.choice(("trace/step_000000", "metrics.jsonl", "trace/step_000001")), took_s)
        time.sleep(moments.uniform(0.0, 0.5 if number % 4 else 1.0) * took_s)
        os.kill(process_id, moments.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)))
        os.waitpid(process_id, 0)  # where it had ended before, the signal found nobody to act on
        problems = list(find_problems(own / name, bits, lines))
        stage = len(read_metrics(own / name)) + (own / name / "run.json").exists()
        stages[stage] = stages.get(stage, 0) + 1
        if number % 8 == 0:
            code = os.waitstatus_to_exitcode(os.waitpid(start(own, name), 0)[1])
            problems += [*find_problems(own / name, bits, lines)]
            if code not in (0, 5):
                problems.append(f"a second run in the folder ended with {code}")
        for problem in problems:
            print(f"{number} {name}: {problem}", flush=True)
    print(f"kills: {count}, by lines of metrics and run.json: {dict(sorted(stages.items()))}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
