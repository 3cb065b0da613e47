"""What tests of saving run in a process of its own: ``-m tests.pipelines.workers.saving_worker TASK FOLDER ...``.

- ``trace FOLDER``: save one checkpoint, and print what was synced and renamed on the way, in order, as JSON.
- ``kill FOLDER NUM SEED``: let children save one checkpoint after another, end each by SIGKILL at a moment of chance,
  and print as JSON how many kills fell into a save, which processes were left, and what was wrong with a checkpoint
  that has its last file. A child's orphans become this process's, so none can hide.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
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
_LONGEST_LIFE_S = 0.25
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
    sync, replace, link = os.fsync, os.replace, os.link

    def logged(kind: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(source: str | Path, target: str | Path) -> None:
            function(source, target)
            events.append([kind, str(target), str(source)])

        return call

    def logged_sync(fd: Any) -> None:
        sync(fd)
        events.append(["fsync", os.readlink(f"/proc/self/fd/{fd}"), ""])

    os.fsync, os.replace, os.link = logged_sync, logged("rename", replace), logged("link", link)
    try:
        save_checkpoint(folder, learner, _STATE)
    finally:
        os.fsync, os.replace, os.link = sync, replace, link
    return events


def save_without_end(root: Path) -> None:
    """Saves one checkpoint after another; the first step is the first that is not there."""
    learner = build_learner()
    step = 1
    while True:
        step += 1
        folder = checkpoint_folder(root, step)
        if not (folder / "run_state.json").exists():
            save_checkpoint(folder, learner, _STATE)


def kill(root: Path, num_kills: int, seed: int) -> dict[str, object]:
    """Kills children while they save, and looks at what they left."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    chance = random.Random(seed)
    torn, whole, left, problems = 0, 0, [], []
    for number in range(num_kills):
        child = os.fork()
        if child == 0:
            _run_child(root)
        _wait_for_save(root, child)
        time.sleep(chance.uniform(0.0, _LONGEST_LIFE_S))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
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


def _run_child(root: Path) -> None:
    try:
        save_without_end(root)
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        (root.parent / "error.txt").write_text(repr(error), encoding="utf-8")
    finally:
        os._exit(1)


def _wait_for_save(root: Path, child: int) -> None:
    """Returns when the child has begun to save."""
    known = set(root.glob("*/*"))
    until = time.monotonic() + 60.0
    while set(root.glob("*/*")) <= known:
        assert time.monotonic() < until
        assert os.waitpid(child, os.WNOHANG) == (0, 0), (root.parent / "error.txt").read_text(encoding="utf-8")
        time.sleep(0.002)


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
