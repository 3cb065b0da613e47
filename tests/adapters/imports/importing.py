"""Imports files for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mock_scheduler import read_recording
from mock_scheduler.adapters.imports.steps import ImportOptions
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.commands.foreign import ImportCommand, run_import

ASSUMED = ["sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.logprobs_mode"]


def imported(name: str, source: Path, **options: Any) -> dict[int, RolloutBatch]:
    """Imports files and gives the batches of the recording by step; what they lack is in their meta."""
    folder = source.parent / f"recording of {name}"
    command = ImportCommand(rollouts=ImportOptions(**options))
    assert run_import(name, source, folder, command) == 0
    recording = read_recording(folder)
    assert recording.verify().is_whole
    return {step: recording.batch(step) for step in recording.steps["train"]}


def lacks(batch: RolloutBatch) -> list[str]:
    found = batch.meta["not_in_source"]
    assert isinstance(found, list | tuple)
    return [str(name) for name in found if name not in ASSUMED]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
