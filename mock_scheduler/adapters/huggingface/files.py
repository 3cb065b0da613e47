"""Reads the safetensors files of a Hugging Face checkpoint, each tensor in parts, and never all of them at once.

Contract: only ``*.safetensors`` and JSON are opened, so nothing of a checkpoint runs. A missing, superfluous or
mis-shaped tensor is refused by its name before any value is read; so is a file that is cut, and an index that says
something else than its files. Links are followed: the cache of Hugging Face is made of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from mock_scheduler.adapters.huggingface.architectures import HuggingFaceModel
from mock_scheduler.adapters.huggingface.names import Shape, list_tensors, rows_of
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import MAX_JSON_CONTAINERS, count_containers
from mock_scheduler.support.foreign_files import load_json, open_foreign, read_pieces
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.geometry import rectangles_of
from mock_scheduler.trace.shards import ShardSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: By safetensors' names; those of quantised weights are missing, since their scales lie elsewhere.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MAX_HEADER_BYTES = 100 * 10**6  # safetensors' own limit
_MAX_LISTED = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The description at the beginning of a safetensors file.

    ``text``: as it stands there. ``tensors``: by name, with ``dtype``, ``shape`` and ``data_offsets``. ``start``: the
    first byte of the data.
    """

    text: str
    tensors: Mapping[str, Mapping[str, Any]]
    start: int

    @property
    def in_order(self) -> list[str]:
        """The tensors in the order of their data."""
        return sorted(self.tensors, key=lambda name: tuple(self.tensors[name]["data_offsets"]))


def read_header(path: Path) -> Header:
    """Reads the header of a file; raises ``ConfigError`` where it is no whole safetensors file."""
    try:
        with open_foreign(path) as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError(f"says that its header has {size} bytes")
            text = stream.read(size).decode("utf-8")
            num_bytes = path.stat().st_size
        return parse_header(text, num_data_bytes=num_bytes - 8 - size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no whole safetensors file: {error}; copy it again") from error


def _read_headers(folder: Path, names: Sequence[str]) -> dict[str, Header]:
    """Reads the headers of all files; raises ``ConfigError`` with every one that cannot be read."""
    headers: dict[str, Header] = {}
    problems = []
    for name in names:
        try:
            headers[name] = read_header(folder / name)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return headers


def parse_header(text: str, *, num_data_bytes: int | None = None) -> Header:
    """Reads the text of a header; raises ``ValueError`` where its tensors do not fill the data without gaps."""
    if len(text) > MAX_JSON_CONTAINERS and count_containers(text) > MAX_JSON_CONTAINERS:
        raise ValueError(f"its header holds more than {MAX_JSON_CONTAINERS} lists and objects")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("its header is no JSON of a tensor's depth") from error
    if not isinstance(content, dict):
        raise ValueError("its header is no object")
    tensors = {name: entry for name, entry in content.items() if name != "__metadata__"}
    spans = []
    for name, entry in tensors.items():
        given = entry if isinstance(entry, dict) else {}
        shape, offsets = given.get("shape"), given.get("data_offsets")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ValueError(f"{name} has no shape and place")
        if not isinstance(given.get("dtype"), str):
            raise ValueError(f"{name} has no dtype")
        dtype = DTYPES.get(given["dtype"])
        if dtype is not None and offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} has {offsets[1] - offsets[0]} bytes")
        spans.append(tuple(offsets))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"byte {min(start, end)} of its data belongs to no tensor, or to two")
        end = stop
    if num_data_bytes is not None and end != num_data_bytes:
        raise ValueError(f"its tensors have {end} bytes, and {num_data_bytes} are there")
    return Header(text=text, tensors=tensors, start=8 + len(text.encode("utf-8")))


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


@dataclass(slots=True)
class WeightFiles:
    """The weights in a folder; files are opened when they are read, and closed at the end of the block.

    ``places``: the file of each tensor.
    """

    folder: Path
    model: HuggingFaceModel
    headers: Mapping[str, Header]
    places: Mapping[str, str]
    _open: dict[str, Any] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def find(cls, folder: Path, model: HuggingFaceModel, list_shapes: Callable[[], Mapping[str, Shape]]) -> WeightFiles:
        """Finds the files of a model whose parameters have these shapes, by canonical name; reads headers alone.

        Raises:
            ConfigError: with every file and tensor that is missing, superfluous or another one.
        """
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [SINGLE_FILE]
        headers = _read_headers(folder, names)
        # A layer has several tensors, and an expert three: so nothing is listed that the files could not hold.
        found, layers = sum(len(header.tensors) for header in headers.values()), int(model.fields["num_layers"])
        sparse = layers if model.fields.get("moe_layer_freq") == 1 else 1
        if found < max(layers, sparse * int(model.fields["num_moe_experts"] or 0)):
            raise ConfigError(f"{folder} has {found} tensors, too few for the {layers} layers of its config.json")
        problems = [] if index is None else _compare_index(index, headers)
        problems += _compare_tensors(headers, list_tensors(list_shapes(), model)[0])
        if problems:
            raise ConfigError(
                f"{folder} does not hold the weights that its config.json describes:"
                f"{bullet_list(problems, _MAX_LISTED)}"
            )
        places = {tensor: name for name, header in headers.items() for tensor in header.tensors}
        return cls(folder=folder, model=model, headers=headers, places=places)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.clear()
        self._closing.close()

    def read(self, spec: ShardSpec, name: str) -> torch.Tensor:
        """Reads a rank's part of the parameter ``name``, in the dtype of the files; 0 outside the whole tensor."""
        parts = rows_of(name, spec.global_shape[0], self.model)
        dtypes = {DTYPES[self.describe(rows.tensor)[0]] for rows in parts}
        local = torch.zeros(spec.local_shape, dtype=functools.reduce(torch.promote_types, dtypes))
        for box, values in rectangles_of(local, spec):
            first, end = 0, box.origin[0] + box.sizes[0]
            others = tuple(
                slice(start, start + size) for start, size in zip(box.origin[1:], box.sizes[1:], strict=True)
            )
            for rows in parts:
                start, stop = max(first, box.origin[0]), min(first + rows.length, end)
                if start < stop:
                    there = slice(start - first + rows.start, stop - first + rows.start)
                    values[start - box.origin[0] : stop - box.origin[0]] = self._read_part(
                        rows.tensor, (there, *others)
                    )
                first += rows.length
        return local

    def _read_part(self, tensor: str, part: tuple[slice, ...]) -> torch.Tensor:
        file = self.places[tensor]
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = self._closing.enter_context(safe_open(path, framework="pt"))
            values: torch.Tensor = self._open[file].get_slice(tensor)[part]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return values

    def digest(self, tensor: str) -> str:
        """SHA-256 (hex) of a tensor's bytes, read in pieces."""
        file = self.places[tensor]
        header = self.headers[file]
        start, stop = header.tensors[tensor]["data_offsets"]
        digest, num_read = hashlib.sha256(), 0
        try:
            with open_foreign(self.folder / file) as stream:
                stream.seek(header.start + start)
                for piece in read_pieces(stream, stop - start):
                    digest.update(piece)
                    num_read += len(piece)
        except OSError as error:
            raise ConfigError(f"{self.folder / file} cannot be read: {error.strerror or error}") from error
        if num_read != stop - start:
            raise ConfigError(f"{self.folder / file} was cut while it was read; copy it again")
        return digest.hexdigest()

    def describe(self, tensor: str) -> tuple[str, list[int]]:
        """Returns dtype and shape of a tensor, by safetensors' names."""
        entry = self.headers[self.places[tensor]].tensors[tensor]
        return entry["dtype"], entry["shape"]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Reads the file of each tensor; ``None`` where one file has all of them."""
    path, has_single = folder / INDEX_FILE, (folder / SINGLE_FILE).is_file()
    if not path.is_file():
        if not has_single:
            raise ConfigError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read. Save the model again "
                "by save_pretrained of transformers"
            )
        return None
    try:
        index = load_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} {error}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"{path} has no weight_map from each tensor to its file")
    if has_single:
        raise ConfigError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant")
    wrong = sorted({file for file in places.values() if Path(file).name != file or not file.endswith(".safetensors")})
    if wrong:
        raise ConfigError(f"{path} names {wrong[0]!r}, which is no safetensors file of the folder")
    return places


def _compare_index(index: Mapping[str, str], headers: Mapping[str, Header]) -> list[str]:
    """Lists tensors that are not in the file of the index, and those in a file of which the index says nothing."""
    problems = [f"{name}: {INDEX_FILE} has it in {file}, which does not hold it" for name, file in index.items()
                if name not in headers[file].tensors]  # fmt: skip
    return problems + [
        f"{name}: is in {file}, and {INDEX_FILE} has it {f'in {index[name]}' if name in index else 'nowhere'}"
        for file, header in headers.items()
        for name in header.tensors
        if index.get(name) != file
    ]


def _compare_tensors(headers: Mapping[str, Header], expected: Mapping[str, Shape]) -> list[str]:
    found = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    problems = [
        f"{name}: is missing{_advice_of(name)}; expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in found
    ]
    for name, entry in found.items():
        if name not in expected:
            problems.append(f"{name}: is of no part of this model{_advice_of(name)}")
        elif tuple(entry["shape"]) != expected[name]:
            problems.append(f"{name}: has shape {entry['shape']}, expected {list(expected[name])}")
        elif entry["dtype"] not in DTYPES:
            problems.append(f"{name}: is of dtype {entry['dtype']}; read are {', '.join(DTYPES)}")
    return problems


def _advice_of(name: str) -> str:
    return ", by tie_word_embeddings of config.json" if name == "lm_head.weight" else ""
