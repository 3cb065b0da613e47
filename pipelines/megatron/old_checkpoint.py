"""Reads checkpoints of before there were seals: Megatron's distributed checkpoint, which torch's pickles describe.

Contract: no pickle is run. Its descriptions are read as data (``mock_scheduler.support.pickles.data``) against a closed
list of names, and tensors are the bytes of stored, never inflated entries of torch's archives, of the size that their
shape says. Where a tensor lies in the whole one says Megatron's ``sharded_state_dict``, as when the files were written.
It can go when no such checkpoint is needed any more (written up to megatron-core 0.19.2, format ``torch_dist``).
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.observed_model import unwrapped
from mock_scheduler.megatron.optimizer_state import ParameterState, state_dtype, state_names
from mock_scheduler.support.foreign_files import open_foreign, read_bytes
from mock_scheduler.support.pickles.data import MAX_PICKLE_BYTES, Name, PickledDataError, Record, read_pickled_data
from mock_scheduler.support.tensor_bytes import from_bytes
from mock_scheduler.trace.geometry import Rectangle, intersect
from pipelines.megatron.run_state import ModelCounters
from pipelines.megatron.stored_boxes import slices_within
from pipelines.megatron.trained_model import TrainedModel

_DCP = "torch.distributed.checkpoint"
_DTYPES = {
    "torch.float64": torch.float64,
    "torch.float32": torch.float32,
    "torch.bfloat16": torch.bfloat16,
    "torch.float16": torch.float16,
    "torch.int64": torch.int64,
    "torch.uint8": torch.uint8,
}
_METADATA_NAMES = frozenset(
    {
        *_DTYPES,
        *("torch.Size", "torch.serialization._get_layout"),
        f"{_DCP}.filesystem._StorageInfo",
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_DCP}.metadata.{name}" for name in ("TensorProperties", "ChunkStorageMetadata")),
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    }
)
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}
_TENSOR_NAMES = frozenset({*_STORAGES, "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"})


def load_old_states(
    folder: Path, model: TrainedModel
) -> tuple[ModelCounters, dict[torch.nn.Parameter, ParameterState]]:
    """Sets parameters and buffers of a model; returns its counters, and the states of Adam.

    Raises:
        ConfigError: the files cannot be read, or hold another model.
    """
    chunks = {f"model{index}": unwrapped(chunk).sharded_state_dict() for index, chunk in enumerate(model.chunks)}
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    sharded = {id(item.data): item for item in nested_values(chunks) if isinstance(item, _SHARDED)}
    states = {
        str(index): {
            name: _state_like(sharded[id(parameter)], name, torch.zeros_like(parameter, dtype=state_dtype(parameter)))
            for name in state_names(parameter)
        }
        for index, parameter in enumerate(parameters)
    }
    wanted, _, factories = load_preprocess({**chunks, "optimizer": states})
    try:
        index, counters = _Index.open(folder), _read_common(folder)
        # Objects are the extra state of layers, which none of this pipeline's layers has.
        loaded = dict_list_map_inplace(
            lambda item: index.read(item) if isinstance(item, ShardedTensor) else None, wanted
        )
    except (OSError, zipfile.BadZipFile, PickledDataError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} cannot be read, or is of another model: {error}\n"
            "Resume from another checkpoint."
        ) from error
    loaded = apply_factory_merges(loaded, factories)
    for position, chunk in enumerate(model.chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{position}"])
    return counters, {
        parameter: {name: tensor.to(parameter.device) for name, tensor in loaded["optimizer"][str(number)].items()}
        for number, parameter in enumerate(parameters)
    }


_SHARDED = (ShardedTensor, ShardedTensorFactory)


def _state_like(sharded: Any, name: str, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - either of Megatron's two
    key = f"optimizer.state.{name}.{sharded.key}"
    if isinstance(sharded, ShardedTensor):
        return replace(sharded, key=key, data=tensor, dtype=tensor.dtype)
    return replace(sharded, key=key, data=tensor)


# --- Files as data ----------------------------------------------------------------------------------------------------


def _read_common(folder: Path) -> ModelCounters:
    path = folder / "common.pt"
    found = read_pickled_data(
        _read_entry(read_bytes(path, max_bytes=MAX_PICKLE_BYTES, inside=path.parent), "data.pkl"), names=()
    )
    schedule = found.get("lr_schedule") if isinstance(found, dict) else None
    if not isinstance(schedule, dict):
        raise PickledDataError(f"{path.name} has no schedule")
    return ModelCounters(num_updates=_count(found.get("num_updates")), lr_steps=_count(schedule.get("num_steps")))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise PickledDataError("has something else where a counter should be")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Holds a stored box of a whole tensor: its bytes lie in ``length`` bytes of a file from ``offset`` on."""

    box: Rectangle
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """Holds the description of a model's tensors: the chunks of each key."""

    folder: Path
    chunks: Mapping[str, list[_Chunk]]

    @classmethod
    def open(cls, folder: Path) -> _Index:
        """Reads ``.metadata``."""
        path = folder / ".metadata"
        data = read_bytes(path, max_bytes=MAX_PICKLE_BYTES, inside=folder)
        root = _record(read_pickled_data(data, names=_METADATA_NAMES), "Metadata")
        sizes = {
            (key, _shape(_record(chunk, "ChunkStorageMetadata").get("offsets"))): _shape(chunk.get("sizes"))
            for key, tensor in _items(root.get("state_dict_metadata"))
            if _is(tensor, "TensorStorageMetadata")
            for chunk in _list(tensor.get("chunks"))
        }
        chunks: dict[str, list[_Chunk]] = {}
        for place, info in _items(root.get("storage_data")):
            key = _record(place, "MetadataIndex").get("fqn")
            origin = _shape(place.state["offset"]) if place.state.get("offset") is not None else None
            if origin is not None and (key, origin) in sizes:
                chunks.setdefault(key, []).append(_read_chunk(origin, sizes[key, origin], info))
        return cls(folder=folder, chunks=chunks)

    def read(self, wanted: ShardedTensor) -> torch.Tensor:
        """Reads a rank's tensor; 0 where no chunk has an element, as in the padding of a vocabulary."""
        local = torch.zeros(tuple(wanted.local_shape), dtype=wanted.dtype)
        box = Rectangle(
            origin=tuple(wanted.global_offset), sizes=(*(1,) * wanted.prepend_axis_num, *wanted.local_shape)
        )
        values = local.view(box.sizes)
        is_filled, num_read = torch.zeros(box.sizes, dtype=torch.bool), 0
        for chunk in self.chunks.get(wanted.key, []):
            if len(chunk.box.sizes) != len(box.sizes):
                raise PickledDataError(f"{wanted.key} has {len(chunk.box.sizes)} dimensions, this run {len(box.sizes)}")
            shared = intersect(box, chunk.box)
            if shared is not None:
                content = self._read_content(chunk, wanted.dtype)
                values[slices_within(shared, box)] = content[slices_within(shared, chunk.box)]
                place = is_filled[slices_within(shared, box)]
                if place.any():  # it would be counted in the place of one that is nowhere
                    raise PickledDataError(f"elements of {wanted.key} are there twice")
                place.fill_(True)
                num_read += shared.num_elements
        if num_read != box.num_elements and not (wanted.allow_shape_mismatch and wanted.key in self.chunks):
            raise PickledDataError(f"{box.num_elements - num_read} elements of {wanted.key} are not there")
        return local

    def _read_content(self, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
        path = self.folder / chunk.file
        if Path(chunk.file).name != chunk.file:
            raise PickledDataError(f"{chunk.file!r} leads out of {self.folder}")
        with open_foreign(path, inside=self.folder) as file:
            size = os.fstat(file.fileno()).st_size
            if chunk.offset + chunk.length > size:
                raise PickledDataError(f"{chunk.file} has {size} bytes, and a tensor at byte {chunk.offset}")
            file.seek(chunk.offset)
            content = _read_tensor(file.read(chunk.length))
        if content.dtype != dtype or tuple(content.shape) != chunk.box.sizes:
            raise PickledDataError(
                f"{chunk.file} has {content.dtype} {list(content.shape)} at byte {chunk.offset}; expected {dtype} "
                f"{list(chunk.box.sizes)}"
            )
        return content


def _read_chunk(origin: tuple[int, ...], sizes: tuple[int, ...], info: object) -> _Chunk:
    record = _record(info, "_StorageInfo")
    file, offset, length = (record.get(name) for name in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not all(type(number) is int and number >= 0 for number in (offset, length)):
        raise PickledDataError("has a tensor without a place in a file")
    if len(origin) != len(sizes):
        raise PickledDataError("has a tensor whose origin and sizes have different numbers of dimensions")
    return _Chunk(box=Rectangle(origin=origin, sizes=sizes), file=file, offset=offset, length=length)


def _read_tensor(data: bytes) -> torch.Tensor:
    """Reads a tensor of torch's archive, whose description is data and whose storage lies in the archive as it is."""
    described = read_pickled_data(_read_entry(data, "data.pkl"), names=_TENSOR_NAMES, has_persistent_ids=True)
    if not _is(described, "_rebuild_tensor_v2") or len(described.arguments) < 4:
        raise PickledDataError("has an archive that is no tensor")
    storage, offset, shape, strides = described.arguments[:4]
    kind = storage[1] if isinstance(storage, tuple) and len(storage) == 5 else None
    dtype = _STORAGES.get(kind.text) if isinstance(kind, Name) else None
    if dtype is None or not isinstance(storage[2], str) or _read_entry(data, "byteorder") != b"little":
        raise PickledDataError("has a tensor without a storage of a known dtype")
    content = np.frombuffer(bytearray(_read_entry(data, f"data/{storage[2]}")), dtype=np.uint8)
    numel, sizes = len(content) // dtype.itemsize, _shape(shape)
    # No element twice: a stride of 0 would make a large tensor of a small file.
    if len(content) % dtype.itemsize or math.prod(sizes) > numel or type(offset) is not int:
        raise PickledDataError(f"has a tensor of shape {list(sizes)} with {numel} elements")
    try:
        return from_bytes(content, dtype, (numel,)).as_strided(sizes, _shape(strides), offset)
    except RuntimeError as error:
        raise PickledDataError(f"has a tensor whose strides leave its storage: {error}") from error


def _read_entry(data: bytes, name: str) -> bytes:
    """Reads one entry of torch's archive, below its one folder; it must lie there as it is, not deflated."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        found = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == name]
        if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].file_size > len(data):
            raise PickledDataError(f"has an archive without one stored entry {name}")
        return archive.read(found[0])


def _is(value: object, name: str) -> bool:
    return isinstance(value, Record) and value.kind.text.rpartition(".")[2] == name


def _record(value: object, name: str) -> Record:
    if not isinstance(value, Record) or not _is(value, name) or not isinstance(value.state, dict):
        raise PickledDataError(f"has something else where a {name} should be")
    return value


def _items(value: object) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise PickledDataError("has something else where a dict should be")
    return list(value.items())


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise PickledDataError("has something else where a list should be")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if _is(value, "Size") and isinstance(value, Record) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise PickledDataError("has something else where sizes should be")
    return value
