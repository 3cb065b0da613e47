"""Writes a checkpoint of this pipeline back as the Hugging Face checkpoint that its run began with.

``mock-scheduler export-hf CHECKPOINT FOLDER`` starts it, as ``python -m pipelines.export_hf CHECKPOINT FOLDER``. The
new folder has the files of the one that was read: names, order and dtype of the tensors, index, configuration and
tokenizer; so a checkpoint that was not trained is written back byte for byte. One tensor is in memory at a time.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from mock_scheduler.adapters.huggingface.architectures import HuggingFaceModel
from mock_scheduler.adapters.huggingface.config import read_model
from mock_scheduler.adapters.huggingface.files import DTYPES, parse_header
from mock_scheduler.adapters.huggingface.names import Place, list_tensors
from mock_scheduler.adapters.huggingface.writing import write_weights
from mock_scheduler.determinism.agreement_rounds import Reduction, Words
from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.tensor_bytes import dtype_name, find_dtype
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message, print_output
from mock_scheduler.support.text import printable
from mock_scheduler.trace.shards import whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import SOURCE_FOLDER, HuggingFaceSource, read_stored_source
from pipelines.megatron.parameter_shapes import Shape, parameter_shapes
from pipelines.megatron.run_state import RunState, check_contents, check_files, read_run_state
from pipelines.megatron.stored_boxes import PARAMETER_KEY, StoredTensors

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
        ConfigError: the checkpoint is damaged, did not begin with one of Hugging Face's, or the folder is there.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already; give the name of a folder to make")
    state = read_run_state(checkpoint)
    check_files(checkpoint, state)
    check_contents(checkpoint, state, _OneRank())
    source = read_stored_source(checkpoint, state.files)
    if source is None:
        raise ConfigError(
            f"{checkpoint} is of a run without model.hf_checkpoint, so that nothing says which files, names of tensors "
            "and tokenizer to write. Begin the run with a Hugging Face checkpoint"
        )
    stored_dtype = find_dtype(state.fixed.get("precision"))
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    aside.mkdir(parents=True)
    try:
        for name, content in source.companions.items():
            (aside / name).write_bytes(content)
        paths = [checkpoint / file for file in sorted(state.files) if file.startswith(f"{_POLICY}/")]
        with StoredTensors(paths) as stored:
            dtypes = _write(aside, source, stored, checkpoint / SOURCE_FOLDER, stored_dtype)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _describe(folder, state, source, stored_dtype, dtypes)


def _write(
    aside: Path, source: HuggingFaceSource, stored: StoredTensors, described_in: Path, dtype: torch.dtype
) -> set[torch.dtype]:
    """Writes all weight files; returns the dtypes in them."""
    model = ModelConfig(hf_checkpoint=str(described_in))
    shapes = parameter_shapes(model, vocab_size=int(model.vocab_size or 0), sequence_length=0)
    described = read_model(described_in)
    try:
        entries = {
            name: entry for text in source.headers.values() for name, entry in parse_header(text).tensors.items()
        }
        dtypes = {name: DTYPES[entry["dtype"]] for name, entry in entries.items()}
        write_weights(aside, source.headers, _reader(stored, shapes, described, dtypes, dtype))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{described_in} does not describe the weights of its checkpoint: {error!r}") from error
    return set(dtypes.values())


def _reader(
    stored: StoredTensors,
    shapes: Mapping[str, Shape],
    described: HuggingFaceModel,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype,
) -> Callable[[str], torch.Tensor]:
    """Makes a function that reads a tensor by Hugging Face's name."""
    expected, places = list_tensors(shapes, described)

    @functools.lru_cache(maxsize=2)  # several tensors are rows of one parameter
    def parameter(name: str) -> torch.Tensor:
        return stored.read(f"{PARAMETER_KEY}/{name}", whole(name, shapes[name]), dtype)

    def read(tensor: str) -> torch.Tensor:
        values = torch.empty(expected[tensor], dtype=dtype)
        for place in places[tensor]:
            _copy_rows(values, parameter(place.name), place)
        return values.to(dtypes[tensor])

    return read


def _copy_rows(values: torch.Tensor, parameter: torch.Tensor, place: Place) -> None:
    start, length = place.rows.start, place.rows.length
    values[start : start + length] = parameter[place.own_start : place.own_start + length]


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
