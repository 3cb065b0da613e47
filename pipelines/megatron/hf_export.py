"""Writes a policy's stored parameters as a Hugging Face checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.huggingface.architectures import HuggingFaceModel
from mock_scheduler.adapters.huggingface.config import CONFIG_FILE, describe_model, read_model
from mock_scheduler.adapters.huggingface.describing import write_config, write_header
from mock_scheduler.adapters.huggingface.files import DTYPES, SINGLE_FILE, parse_header
from mock_scheduler.adapters.huggingface.names import Place, list_tensors
from mock_scheduler.adapters.huggingface.writing import write_weights
from mock_scheduler.support.files import encode_json
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.shards import whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.parameter_shapes import Shape, parameter_shapes
from pipelines.megatron.stored_boxes import PARAMETER_KEY, StoredTensors


def write_stored(
    folder: Path, headers: Mapping[str, str], stored: StoredTensors, dtype: torch.dtype
) -> set[torch.dtype]:
    """Writes all weight files into a folder with its ``config.json``; returns the dtypes in them.

    headers: the text of each file's header. dtype: of the stored parameters.
    Raises ``KeyError`` or ``ValueError`` where headers and parameters are of two models.
    """
    described = read_model(folder)
    entries = {name: entry for text in headers.values() for name, entry in parse_header(text).tensors.items()}
    dtypes = {name: DTYPES[entry["dtype"]] for name, entry in entries.items()}
    write_weights(folder, headers, _reader(stored, _shapes_of(described), described, dtypes, dtype))
    return set(dtypes.values())


def _shapes_of(described: HuggingFaceModel) -> dict[str, Shape]:
    model = ModelConfig.model_validate(described.fields)
    return parameter_shapes(model, vocab_size=int(model.vocab_size or 0), sequence_length=0)


def single_header(described: HuggingFaceModel, dtype: torch.dtype) -> str:
    """Makes the header of one file with all tensors, each of ``dtype``."""
    return write_header(
        list_tensors(_shapes_of(described), described)[0],
        dtype=next(name for name, one in DTYPES.items() if one is dtype),
        item_bytes=dtype.itemsize,
    )


def describe_own(model: ModelConfig, *, dtype: torch.dtype, positions: int) -> HuggingFaceSource:
    """Describes a model that was trained from scratch, as the kind that it is; ``model``: with its ``vocab_size``.

    Raises:
        ConfigError: no kind of Hugging Face model is this one.
    """
    content = write_config(_fields_of(model), dtype=dtype_name(dtype), max_positions=positions)
    header = single_header(describe_model(content, origin="the model"), dtype)
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
