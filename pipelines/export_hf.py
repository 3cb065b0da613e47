"""Writes a checkpoint of this pipeline as a Hugging Face one, as a rule as the one that its run began with.

``mock-scheduler export-hf CHECKPOINT FOLDER`` starts it, as ``python -m pipelines.export_hf CHECKPOINT FOLDER``. The
new folder has the files of the one that was read: names, order and dtype of the tensors, index, configuration and
tokenizer; so a checkpoint that was not trained is written back byte for byte. A model that was trained from scratch is
written as the kind that it is, in one file and without a tokenizer. One tensor is in memory at a time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import ValidationError

from mock_scheduler.determinism.agreement_rounds import Reduction, Words
from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.tensor_bytes import dtype_name, find_dtype
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message, print_output
from mock_scheduler.support.text import printable
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_export import describe_own, write_stored
from pipelines.megatron.hf_source import HuggingFaceSource, read_stored_source
from pipelines.megatron.run_state import RunState, check_contents, check_files, read_run_state
from pipelines.megatron.stored_boxes import StoredTensors

_POLICY = "policy"


class _OneRank:
    """The only rank, for a check that ranks share out."""

    global_rank, world_size = 0, 1

    def reduce(self, reduction: Reduction) -> Words:
        """Returns the rank's own words."""
        return list(reduction.words)

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the rank's own bytes."""
        return [payload]


def export(checkpoint: Path, folder: Path) -> str:
    """Writes the policy of a checkpoint to a new folder; returns a sentence on it.

    Raises:
        ConfigError: the checkpoint is damaged, its model is of no kind of Hugging Face's, or the folder is there.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already; give the name of a folder to make")
    state = _read_whole(checkpoint)
    stored_dtype = find_dtype(state.fixed.get("precision"))
    source = read_stored_source(checkpoint, state.files) or _describe_own(checkpoint, state, stored_dtype)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    aside.mkdir(parents=True)
    try:
        for name, content in source.companions.items():
            (aside / name).write_bytes(content)
        paths = [checkpoint / file for file in sorted(state.files) if file.startswith(f"{_POLICY}/")]
        with StoredTensors(paths) as stored:
            dtypes = _write(aside, source, stored, checkpoint, stored_dtype)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _describe(folder, state, source, stored_dtype, dtypes)


def _read_whole(checkpoint: Path) -> RunState:
    """Reads where the checkpointed run stood, once every bit of its files is as it was written."""
    try:
        state = read_run_state(checkpoint)
        check_files(checkpoint, state)
        check_contents(checkpoint, state, _OneRank())
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("resume_from_checkpoint: ")) from error  # no key was given here
    return state


def _write(
    aside: Path, source: HuggingFaceSource, stored: StoredTensors, checkpoint: Path, dtype: torch.dtype
) -> set[torch.dtype]:
    """Writes all weight files; returns the dtypes in them."""
    try:
        return write_stored(aside, source.headers, stored, dtype)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{checkpoint} does not describe its own weights: {error!r}") from error


def _describe_own(checkpoint: Path, state: RunState, dtype: torch.dtype) -> HuggingFaceSource:
    """Describes a model that was trained from scratch, by the settings that its checkpoint fixes."""
    section: dict[str, Any] = {}
    for key, value in state.fixed.items():
        names = key.split(".")
        if names[0] == "model":
            place = section.setdefault(names[1], {}) if len(names) > 2 else section
            place[names[-1]] = value
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(f"{checkpoint} has a model of another release: {error}") from error
    positions = state.training.get("sequence_length")
    return describe_own(model, dtype=dtype, positions=positions if isinstance(positions, int) else 1)


def _describe(
    folder: Path, state: RunState, source: HuggingFaceSource, stored: torch.dtype, written: set[torch.dtype]
) -> str:
    files = f"{len(source.headers)} weight file{'s' if len(source.headers) > 1 else ''}"
    text = f"wrote {folder}: {files}, the policy before step {state.next_step}"
    narrower = sorted(dtype_name(dtype) for dtype in written if dtype.itemsize < stored.itemsize)
    if narrower:
        text += f". Parameters of {dtype_name(stored)} were rounded to {', '.join(narrower)}, the dtype that was read"
    return text


def export_hf(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a checkpoint, such as step_000010")],
    folder: Annotated[Path, typer.Argument(help="folder to make")],
) -> int:
    """Write a trained checkpoint as a Hugging Face checkpoint."""
    print_output(printable(export(checkpoint, folder)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports and returns the exit code; ``None``: the process's own arguments."""
    with guarded_terminal():
        end_with_parent(os.environ)
        try:
            given = sys.argv[1:] if arguments is None else arguments
            return parse_arguments(export_hf, given, prog="python -m pipelines.export_hf")
        except MockSchedulerError as error:
            print_message(f"error: {error}")
            return int(error.exit_code)
        except OSError as error:
            print_message(f"error: {error}")
            return int(ExitCode.USAGE)


if __name__ == "__main__":
    sys.exit(main())
