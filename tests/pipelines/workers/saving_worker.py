"""What tests of saving run in a process of its own: ``-m tests.pipelines.workers.saving_worker TASK FOLDER ...``.

- ``trace FOLDER``: save one checkpoint, and print what was synced and renamed on the way, in order, as JSON.
- ``kill FOLDER NUM SEED``: let children save one checkpoint after another, end each by SIGKILL in its second save, and
  print as JSON how many kills left a checkpoint without its last file, which processes were left, and what was wrong
  with a checkpoint that has its last file. A child's orphans become this process's, so none can hide. Every other
  child ends right before one of the save's calls of the file system, the others a while of chance after it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from mock_scheduler.errors import ConfigError
from pipelines.config.schema import PipelineConfig
from pipelines.megatron import file_seals
from pipelines.megatron.checkpoint import save_checkpoint
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import start_runtime
from pipelines.megatron.run_state import RunState, check_contents, check_files, checkpoint_folder, read_run_state
from tests.pipelines.megatron.ranks import one_rank

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LONGEST_LIFE_S = 0.1
_NUM_CALLS = 12  # of the file system in one save, as ``trace`` prints them
_STATE = RunState(next_step=1, mode="real", fixed={"seed": 1}, scheduler={"a": 1}, learner={})


def build_learner() -> Learner:
    """A learner of one small model in this process."""
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 32}
    groups = {"num_env_groups": 2, "group_size": 2}
    config = PipelineConfig.model_validate(
        {
            "exp_name": "saving",
            "model": model,
            "rollout_batch_size": 4,
            "val_batch_size": 4,
            "training": {"micro_batch_size": 2, "global_batch_size": 4},
            "train_env_manager": groups,
            "val_env_manager": groups,
        }
    )
    runtime = start_runtime(config.parallel, seed=1)
    return Learner(config, runtime, vocab_size=32, allowed_tokens=None)


def trace(folder: Path) -> list[list[str]]:
    """Saves into ``folder``; returns ``["fsync" | "rename", path]`` in order."""
    learner = build_learner()
    events: list[list[str]] = []

    def log(kind: str, *paths: str | Path | int) -> None:
        source, target = paths if len(paths) == 2 else ("", os.readlink(f"/proc/self/fd/{paths[0]}"))
        events.append([kind, str(target), str(source)])

    watch_calls(after=log)
    save_checkpoint(folder, learner, _STATE)
    return events


def watch_calls(*, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> None:
    """Calls these with the kind and the arguments of each call of the file system that decides what a kill leaves."""

    def watched(kind: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if before is not None:
                before(kind, *arguments)
            function(*arguments)
            if after is not None:
                after(kind, *arguments)

        return call

    os.fsync, os.replace, os.link = (
        watched("fsync", os.fsync),
        watched("rename", os.replace),
        watched("link", os.link),
    )


def save_without_end(root: Path) -> Iterator[None]:
    """Saves one checkpoint for each item; the first step is the first that is not there."""
    learner = build_learner()
    step = 1
    while True:
        step += 1
        folder = checkpoint_folder(root, step)
        if not (folder / "run_state.json").exists():
            save_checkpoint(folder, learner, _STATE)
            yield


def save_until_killed(root: Path, *, num_calls: int, delay_s: float | None) -> None:
    """Ends this process in its second save, before the call that follows ``num_calls``, or ``delay_s`` after it."""
    saves = save_without_end(root)
    next(saves)
    left = num_calls

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == -1 and delay_s is None:
            end()
        elif left == -1:
            threading.Timer(delay_s or 0.0, end).start()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    watch_calls(before=count)
    for _ in saves:
        pass


def kill(root: Path, num_kills: int, seed: int) -> dict[str, object]:
    """Lets children end while they save, and looks at what they left."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    chance = random.Random(seed)
    torn, whole, left, problems = 0, 0, [], []
    for number in range(num_kills):
        num_calls, delay_s = chance.randrange(_NUM_CALLS), chance.uniform(0.0, _LONGEST_LIFE_S)
        child = os.fork()
        if child == 0:
            _run_child(root, num_calls=num_calls, delay_s=delay_s if number % 2 else None)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), (root.parent / "error.txt").read_text(encoding="utf-8")
        left += [f"kill {number}: {process.name()}" for process in psutil.Process().children(recursive=True)]
        folders = sorted(root.iterdir())
        torn += sum(not (folder / "run_state.json").exists() for folder in folders)
        for folder in folders:
            if (folder / "run_state.json").exists():
                whole += 1
                problems += _find_problems(folder)
        # The last ones stay for the next child, which finds a torn one in its way.
        for folder in folders[:-2]:
            shutil.rmtree(folder)
    return {"kills": num_kills, "torn": torn, "whole": whole, "left": left, "problems": problems}


def _run_child(root: Path, *, num_calls: int, delay_s: float | None) -> None:
    try:
        save_until_killed(root, num_calls=num_calls, delay_s=delay_s)
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        (root.parent / "error.txt").write_text(repr(error), encoding="utf-8")
    finally:
        os._exit(1)


def _find_problems(folder: Path) -> list[str]:
    try:
        state = read_run_state(folder)
        check_files(folder, state)
        check_contents(folder, state, one_rank())
    except ConfigError as error:
        return [str(error)]
    return []


def main() -> None:
    """Carries out the task named on the command line."""
    file_seals.BLOCK_BYTES = 2**16
    task, folder = sys.argv[1], Path(sys.argv[2])
    if task == "trace":
        print(json.dumps(trace(folder)))
        return
    folder.mkdir()
    print(json.dumps(kill(folder, int(sys.argv[3]), int(sys.argv[4]))))


if __name__ == "__main__":
    main()
