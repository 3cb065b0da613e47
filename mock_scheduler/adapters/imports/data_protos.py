"""DataProto files of verl (V0) and ROLL: padded tensors, arrays of objects, and a dict about the whole.

Contract: the state of a pickled ``DataProto`` is data: the bytes of a torch archive with a TensorDict (or, by verl's
``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``, dtypes, shapes and bytes), the arrays, the dict. Rows, tensors and
padding come back by ``PaddedCodec`` bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mock_scheduler.adapters.imports.steps import ForeignStep, FoundFile, ImportOptions, find_files
from mock_scheduler.adapters.imports.tensordicts import TENSORDICT_NAMES, read_tensordict
from mock_scheduler.adapters.padded import ROLL_AGENTIC, ROLL_RLVR, VERL, PaddedCodec, PaddedLayout
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import Mode, RolloutRequest
from mock_scheduler.support.pickles.data import Record
from mock_scheduler.support.pickles.torch_files import read_pickle_file, read_torch_bytes
from mock_scheduler.support.tensor_bytes import find_dtype, from_bytes

_VERL_CLASS = "verl.protocol.DataProto"
_ROLL_CLASS = "roll.distributed.scheduler.protocol.DataProto"
_BYTES_IO = "_io.BytesIO"

_VERL_PATTERN = r"(?:[^/]*/)*()(\d+)/gen_batch\.dp"
_ROLL_PATTERN = r"(?:[^/]*/)*?(?:(train|val)/)?step_(\d+)\.pkl"


def read_verl(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads verl's steps; in a batch without ``uid``, N rows in a row are a group, as the folder's name says."""
    for file in find_files(source, _VERL_PATTERN, "GBS8_N4_in512_out512/1/gen_batch.dp"):
        native = read_data_proto(file.path, class_name=_VERL_CLASS, inside=_inside(source))
        size = options.group_size or _group_size_of(file)
        yield _build_step(
            native, VERL.fit(native), file, "train", options, group_size=None if "uid" in native else size
        )


def read_roll(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads ROLL's steps, of either pipeline."""
    for file in find_files(source, _ROLL_PATTERN, "train/step_000000.pkl"):
        native = read_data_proto(file.path, class_name=_ROLL_CLASS, inside=_inside(source))
        layout = ROLL_RLVR if "prompts" in native and "prompt_id" in native else ROLL_AGENTIC
        mode: Mode = "val" if file.parts[0] == "val" else "train"
        yield _build_step(native, layout, file, mode, options, group_size=options.group_size)


def read_data_proto(path: Path, *, class_name: str, inside: Path | None = None) -> dict[str, Any]:
    """Reads all fields of a pickled ``DataProto``, and its dict as ``meta_info``.

    Raises:
        ForeignFileError: it would run code, or claims more than it holds.
        BatchError: it is of another form.
    """
    kept = (class_name, _BYTES_IO)
    value = read_pickle_file(path, inside=inside, kept=kept, what="a pickled DataProto")
    state = value.state if isinstance(value, Record) and value.kind.text == class_name else None
    if not isinstance(state, tuple) or len(state) not in (3, 4):
        raise BatchError(f"{path} is no {class_name} of three or four parts")
    batch, arrays, meta = state[0], state[1], state[-1]
    if len(state) == 4 and state[2]:
        raise BatchError(f"{path} has columns that lie in another process (remote batch); they are not in the file")
    fields = _read_batch(batch, path)
    if not isinstance(arrays, dict) or not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise BatchError(f"{path}: its non_tensor_batch is no dict of arrays")
    if not isinstance(meta, dict):
        raise BatchError(f"{path}: its meta_info is a {type(meta).__name__}; expected a dict")
    return {**fields, **arrays, "meta_info": meta}


def _read_batch(batch: object, path: Path) -> dict[str, Any]:
    if isinstance(batch, Record) and batch.kind.text == _BYTES_IO and isinstance(batch.state, tuple) and batch.state:
        batch = batch.state[0]
    if isinstance(batch, bytes):
        where = f"{path}, its tensors"
        content = read_torch_bytes(batch, where, kept=TENSORDICT_NAMES)
        return {} if content is None else read_tensordict(content, where)
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict):
        return {name: _read_item(item, f"{path}, {name}") for name, item in batch[2].items()}
    if batch is None:
        return {}
    raise BatchError(f"{path}: its tensors are a {type(batch).__name__}; expected bytes, or verl's numpy form")


def _read_item(item: object, where: str) -> torch.Tensor:
    """One tensor of verl's numpy form: its dtype, shape and bytes."""
    if not isinstance(item, Sequence) or len(item) != 3 or not isinstance(item[2], np.ndarray):
        raise BatchError(f"{where} is a nested tensor, or none; it is not read")
    name, shape, content = item
    try:
        dtype = find_dtype(name)
    except ValueError as error:
        raise BatchError(f"{where} {error}") from error
    if not isinstance(shape, tuple) or any(type(number) is not int or number < 0 for number in shape):
        raise BatchError(f"{where} has a shape that is no tuple of whole numbers of at least 0")
    if math.prod(shape) * dtype.itemsize != content.nbytes:
        raise BatchError(f"{where} is {name} {shape} of {content.nbytes} bytes")
    return from_bytes(content.view(np.uint8).reshape(-1).copy(), dtype, shape)


def _build_step(
    native: Mapping[str, Any],
    layout: PaddedLayout,
    file: FoundFile,
    mode: Mode,
    options: ImportOptions,
    *,
    group_size: int | None,
) -> ForeignStep:
    meta = native["meta_info"]
    stated = meta.get("global_steps", meta.get("global_step"))
    step = stated if type(stated) is int and stated >= 0 else int(file.parts[1])
    codec = PaddedCodec(layout, sampling=options.sampling, group_size=group_size)
    try:
        batch = codec.encode(native, RolloutRequest(global_step=step, batch_size=1, mode=mode))
    except BatchError as error:
        raise BatchError(f"{file.path}: {error}") from error
    lacks = [*options.assumed, "policy_versions", "terminations"]
    roles = (("rollout_logprobs", layout.rollout_logprobs), ("rewards", layout.rewards))
    lacks += [role for role, name in roles if name not in native]
    if layout.group_ids not in native and layout.trajectory_groups not in native and group_size is None:
        lacks.append("groups")
    return ForeignStep(step=step, mode=mode, batch=batch, lacks=tuple(lacks)).noted()


def _group_size_of(file: FoundFile) -> int | None:
    """The N of the folder ``GBS…_N…``, which may be the given one or lie above it."""
    match = re.search(r"(?:^|/)GBS\d+_N(\d+)[^/]*/", str(file.path.absolute()))
    return int(match[1]) if match else None


def _inside(source: Path) -> Path | None:
    return source if source.is_dir() else None
