"""Saving and loading a checkpoint with its seals against the same without, side by side in one run.

A model of some hundred MiB is saved and loaded by one process. Without: no CRC is computed, and none is checked; all
else is the same. *Cold*: the files were taken out of the page cache before they are read, as they are when a job
begins on another machine. Times are medians of rounds in turns; the ratio of both is what counts.

    python -m benchmarks.checkpoint [--rounds 5] [--hidden-size 768]
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.support.arguments import ArgumentParser
from mock_scheduler.support.files import Buffer
from pipelines.config.schema import PipelineConfig
from pipelines.megatron import file_seals
from pipelines.megatron.checkpoint import load_checkpoint, save_checkpoint
from pipelines.megatron.file_seals import FileSeal
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import start_runtime, stop_runtime
from pipelines.megatron.run_state import RunState, check_contents, check_files, read_run_state

_VOCAB_SIZE = 1024


def build_learner(hidden_size: int) -> Learner:
    """A learner of a model of four layers."""
    groups = {"num_env_groups": 2, "group_size": 2}
    model = {"num_layers": 4, "hidden_size": hidden_size, "num_attention_heads": 8, "vocab_size": _VOCAB_SIZE}
    config = PipelineConfig.model_validate(
        {
            "exp_name": "checkpoint-benchmark",
            "model": {**model, "ffn_hidden_size": 4 * hidden_size},
            "rollout_batch_size": 4,
            "val_batch_size": 4,
            "training": {"micro_batch_size": 2, "global_batch_size": 4},
            "train_env_manager": groups,
            "val_env_manager": groups,
        }
    )
    runtime = start_runtime(config.parallel, seed=1)
    return Learner(config, runtime, vocab_size=_VOCAB_SIZE, allowed_tokens=None)


@contextmanager
def without_crc() -> Iterator[None]:
    """Saves without the CRCs of the files; sizes stay."""
    seal_pieces = file_seals.seal_pieces

    def measure_only(pieces: Sequence[Buffer]) -> FileSeal:
        return FileSeal(size_bytes=sum(memoryview(piece).nbytes for piece in pieces), crc32="")

    file_seals.seal_pieces = measure_only
    try:
        yield
    finally:
        file_seals.seal_pieces = seal_pieces


def drop_cache(folder: Path) -> None:
    """Takes the files of a folder out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Comparison:
    """One learner, and the ways to save and load it."""

    def __init__(self, learner: Learner, root: Path) -> None:
        self._learner, self._root = learner, root
        self._ranks = TorchRankGroup(learner.runtime.device)
        self.folder = root / "kept"
        state = RunState(next_step=1, mode="real", fixed={}, scheduler={}, learner=learner.state_dict())
        save_checkpoint(self.folder, learner, state)
        self._state = read_run_state(self.folder)

    def save(self) -> float:
        """Saves once; returns seconds."""
        folder = self._root / "saved"
        shutil.rmtree(folder, ignore_errors=True)
        started_s = time.perf_counter()
        save_checkpoint(folder, self._learner, self._state)
        return time.perf_counter() - started_s

    def save_unsealed(self) -> float:
        """Saves once without CRCs."""
        with without_crc():
            return self.save()

    def load(self, *, is_checked: bool, is_cold: bool) -> float:
        """Loads once; returns seconds."""
        if is_cold:
            drop_cache(self.folder)
        started_s = time.perf_counter()
        if is_checked:
            state = read_run_state(self.folder)
            check_files(self.folder, state)
            check_contents(self.folder, state, self._ranks)
        load_checkpoint(self.folder, self._learner, self._state)
        return time.perf_counter() - started_s


def measure(routes: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each route; the order turns round with every round."""
    times: dict[str, list[float]] = {name: [] for name in routes}
    for turn in range(rounds + 1):
        for name in list(routes) if turn % 2 else list(reversed(routes)):
            seconds = routes[name]()
            if turn:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Prints the table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=768)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(build_learner(arguments.hidden_size), Path(folder))
        size = sum(path.stat().st_size for path in comparison.folder.rglob("*") if path.is_file())
        routes: dict[str, Callable[[], float]] = {"save": comparison.save, "save, no seals": comparison.save_unsealed}
        for name, is_cold in (("load, cold", True), ("load, warm", False)):
            routes[name] = lambda is_cold=is_cold: comparison.load(is_checked=True, is_cold=is_cold)
            routes[f"{name}, no seals"] = lambda is_cold=is_cold: comparison.load(is_checked=False, is_cold=is_cold)
        times = measure(routes, arguments.rounds)
    print(f"{size / 2**20:.0f} MiB, {arguments.rounds} rounds")
    for name in ("save", "load, cold", "load, warm"):
        plain = times[f"{name}, no seals"]
        print(f"{name}: {times[name]:.3f} s, without seals {plain:.3f} s, {times[name] / plain - 1:+.1%}")
    stop_runtime()


if __name__ == "__main__":
    main()
