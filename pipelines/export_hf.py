"""Writes a checkpoint of this pipeline as a Hugging Face one, as a rule as the one that its run began with.

``mock-scheduler export-hf CHECKPOINT FOLDER`` starts it, as ``python -m pipelines.export_hf CHECKPOINT FOLDER``. The
new folder has the files of the one that was read: names, order and dtype of the tensors, index, configuration and
tokenizer; so a checkpoint that was not trained is written back byte for byte. A model that was trained from scratch is
written as the kind that it is, in one file and without a tokenizer. One tensor is in memory at a time.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import ValidationError

from mock_scheduler.adapters.huggingface.architectures import HuggingFaceModel
from mock_scheduler.adapters.huggingface.config import CONFIG_FILE, describe_model, read_model
from mock_scheduler.adapters.huggingface.describing import write_config, write_header
from mock_scheduler.adapters.huggingface.files import DTYPES, SINGLE_FILE, parse_header
from mock_scheduler.adapters.huggingface.names import Place, list_tensors
from mock_scheduler.adapters.huggingface.writing import write_weights
from mock_scheduler.determinism.agreement_rounds import Reduction, Words
from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.files import encode_json
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.tensor_bytes import dtype_name, find_dtype
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message, print_output
from mock_scheduler.support.text import printable
from mock_scheduler.trace.shards import whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import HuggingFaceSource, read_stored_source
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
    described = read_model(aside)
    model = ModelConfig.model_validate(described.fields)
    shapes = parameter_shapes(model, vocab_size=int(model.vocab_size or 0), sequence_length=0)
    try:
        entries = {
            name: entry for text in source.headers.values() for name, entry in parse_header(text).tensors.items()
        }
        dtypes = {name: DTYPES[entry["dtype"]] for name, entry in entries.items()}
        write_weights(aside, source.headers, _reader(stored, shapes, described, dtypes, dtype))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{checkpoint} does not describe its own weights: {error!r}") from error
    return set(dtypes.values())


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
    content = write_config(
        _fields_of(model), dtype=dtype_name(dtype), max_positions=positions if isinstance(positions, int) else 1
    )
    described = describe_model(content, origin=str(checkpoint))
    shapes = parameter_shapes(model, vocab_size=int(model.vocab_size or 0), sequence_length=0)
    header = write_header(
        list_tensors(shapes, described)[0],
        dtype=next(name for name, one in DTYPES.items() if one is dtype),
        item_bytes=dtype.itemsize,
    )
    return HuggingFaceSource(
        digest="", headers={SINGLE_FILE: header}, companions={CONFIG_FILE: encode_json(content) + b"\n"}
    )


def _fields_of(model: ModelConfig) -> dict[str, Any]:
    """Spells out the sizes that follow from others."""
    has_experts = model.num_moe_experts is not None
    return {
        **model.model_dump(exclude={"hf_checkpoint"}),
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "moe_ffn_hidden_size": model.expert_ffn_size if has_experts else None,
        "moe_layer_freq": 1 if all(model.moe_layers) else [int(has_experts) for has_experts in model.moe_layers],
    }


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
