"""Recordings and consoles for the tests of what looks at recordings."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.commands.recorded_rows import run_diff
from mock_scheduler.commands.recordings import run_inspect, run_verify
from mock_scheduler.display.console import Console
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.manifest import Manifest, save_manifest
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.writing.opening import open_recording
from mock_scheduler.recording.writing.writer import WriterOptions
from mock_scheduler.scheduler import RowShard
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import format_bytes
from tests.recording.builders import SAMPLING, make_contract, make_info, make_row

PROVENANCE: dict[str, JSON] = {
    "git": {"root": "my_project", "revision": "0123456789abcdef", "is_modified": True},
    "library_git": {"root": "mock-scheduler", "revision": "fedcba9876543210", "is_modified": False},
    "python": "3.11.9",
    "packages": {"torch": "2.13.0", "megatron-core": "0.16.1", "transformer-engine": None},
    "platform": "Linux-x86_64",
    "vocabulary": ["<pad>", "<bos>", "wall", "Left", "Right"],
}

IN_PLACE = WriterOptions(background=False)


def record(
    dump_dir: Path,
    steps: dict[int, RolloutBatch],
    *,
    mode: str = "train",
    contract: Contract | None = None,
    run_id: str = "run-1",
    **info: Any,
) -> Path:
    """A recording with a fixed manifest; further calls add steps to it."""
    storage = open_storage(str(dump_dir))
    if not (dump_dir / "recording.json").exists():
        save_manifest(storage, Manifest(run_id=run_id, contract=contract or make_contract(), provenance=PROVENANCE))
    write(dump_dir, steps, mode=mode, contract=contract, run_id=run_id, **info)
    return dump_dir


def write(
    dump_dir: Path,
    steps: dict[int, RolloutBatch],
    *,
    mode: str = "train",
    contract: Contract | None = None,
    run_id: str = "run-1",
    options: WriterOptions = IN_PLACE,
    **info: Any,
) -> None:
    writer = open_recording(
        str(dump_dir),
        contract=contract or make_contract(),
        plan=(),
        provenance={},
        resume=False,
        options=options,
        run_id=run_id,
    )
    for step, batch in steps.items():
        writer.write_step(batch, make_info(step, mode=mode, run_id=run_id, **info))
    writer.close()


def make_console(width: int = 80) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width), text


def inspect(dump_dir: Path, *, steps: str | None = None, width: int = 80) -> tuple[int, str]:
    console, text = make_console(width)
    return run_inspect(str(dump_dir), steps=steps, json_path=None, console=console), text.getvalue()


def verify(dump_dir: Path, *, steps: str | None = None) -> tuple[int, list[str]]:
    console, text = make_console()
    code = run_verify(str(dump_dir), steps=steps, json_path=None, console=console)
    return code, text.getvalue().splitlines()


def diff(a: Path, b: Path, *, steps: str | None = None, limit: int = 5) -> tuple[int, str]:
    console, text = make_console(200)
    code = run_diff((str(a), str(b)), steps=steps, limit=limit, json_path=None, console=console)
    return code, text.getvalue().replace(str(a), "FOLDER_A").replace(str(b), "FOLDER_B")


def make_played(*rewards: float) -> RolloutBatch:
    """Two groups of two rows, of 4, 5, 6 and 7 tokens, of which all but two are sampled."""
    rows = [
        make_row(
            number // 2,
            number % 2,
            tokens=range(number + 4),
            response=[False, False] + [True] * (number + 2),
            rollout_logprobs=[-0.5] * (number + 2),
            turn_rewards=(reward,),
        )
        for number, reward in enumerate(rewards)
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)


def make_odd_batch() -> RolloutBatch:
    """Two rows with equal content, an incomplete group, a row without response, an aborted one, and extras."""
    first = make_row(0, 0)
    silent = make_row(
        1, 0, tokens=(1, 2), response=(False, False), rollout_logprobs=(), turn_rewards=(-0.5,), tag="Sokoban"
    )
    rows = [first, replace(first, identity=make_row(0, 1).identity), replace(silent, termination=Termination.ABORTED)]
    extras: dict[str, Any] = {
        "router": Ragged(torch.zeros(2, 4, dtype=torch.uint8)),
        "weight": torch.tensor(1.0),
        "info": {"a": 1},
    }
    rows = [replace(row, extras=extras) for row in rows]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)


def write_shards(dump_dir: Path, step: int, batch: RolloutBatch, *, count: int) -> None:
    """A step in shards of equally many rows; the writer of shard 0, which commits, comes last."""
    size = len(batch) // count
    for index in reversed(range(count)):
        rows = batch.select(range(index * size, (index + 1) * size))
        write(dump_dir, {step: rows}, options=replace(IN_PLACE, shard=RowShard(index=index, count=count)))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def size_of(*paths: Path) -> str:
    return format_bytes(sum(path.stat().st_size for path in paths))


def file_size(train: Path, step: int) -> int:
    return (train / f"step_{step:06d}.safetensors").stat().st_size


def change_contract(**values: Any) -> Contract:
    fields = make_contract().fields
    return Contract([replace(field, value=values.get(field.name, field.value)) for field in fields])


def make_changed() -> RolloutBatch:
    """``make_played(0, 1, 0, 1)`` but for one token and two logprobs of row 1 (tokens 4 to 8, logprobs 2 to 4)."""
    batch = make_played(0, 1, 0, 1)
    tokens, logprobs = batch.tokens.clone(), batch.rollout_logprobs.clone()
    tokens[7], logprobs[3], logprobs[4] = 9, -0.25, -0.125
    return replace(batch, tokens=tokens, rollout_logprobs=logprobs)
