"""The fields of a framework's batch, sorted by how they are kept: framed tensors, dense ones, values per row, meta.

Contract: nothing is dropped. A field that has not one entry per row, or that cannot be kept bit for bit, is refused.

Rows have identities and tags from the fields that the layout names. Without such fields a row is its number, with
``group_size`` rows in a row to a group. Groups a framework names otherwise than by numbers are numbered in the order of
their first appearance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from mock_scheduler.adapters.padded.layout import Frame, PaddedLayout
from mock_scheduler.adapters.padded.segments import Lanes
from mock_scheduler.batch import SampleIdentity
from mock_scheduler.batch.checks import MAX_LISTED_PROBLEMS
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import as_bytes, has_plain_bytes, shape_text

Native: TypeAlias = "Mapping[str, object]"

#: Bytes of a value -> the unsigned integer that holds its bits.
LANE_DTYPES: Mapping[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFields:
    """A framework's batch of ``num_rows`` rows. ``widths``: columns of each frame, 0 where the layout has none.

    ``framed``: tensors ``[B, width of their frame, …]``, or ``[B, …, width]`` where their second dimension is no
    frame's (position ids of several axes, ``[B, 3, width]``); ``dense``: other tensors ``[B, …]``; ``rows``: fields
    with one Python value per row; ``meta``: said of the whole batch, ``None`` where the field is absent.
    ``arrays``: the tensors that are NumPy arrays in the framework's batch.
    """

    num_rows: int
    widths: Mapping[Frame, int]
    framed: Mapping[str, tuple[torch.Tensor, Frame]]
    dense: Mapping[str, torch.Tensor]
    rows: Mapping[str, Sequence[object]]
    meta: Mapping[str, object] | None
    arrays: frozenset[str]


def sort_fields(native: Native, layout: PaddedLayout) -> NativeFields:
    """Sort the fields of a batch; raises ``BatchError`` with all fields that cannot be kept."""
    _check_required(native, layout)
    tensors = {name: tensor for name, value in native.items() if (tensor := _as_tensor(value)) is not None}
    num_rows, widths = len(tensors[layout.tokens]), _measure_widths(tensors, layout)
    framed, dense, problems = {}, {}, []
    for name, tensor in tensors.items():
        problems += _tensor_problems(name, tensor, num_rows)
        frame = _find_frame(name, tensor, layout, widths) if tensor.dim() >= 2 else None
        if frame is None:
            dense[name] = tensor
            continue
        framed[name] = (tensor, frame)
        if widths[frame] not in ((tensor.shape[1],) if name in layout.roles else (tensor.shape[1], tensor.shape[-1])):
            problems.append(
                f"{name!r} has {tensor.shape[1]} columns; expected {widths[frame]}, as {frame.value} tensors have "
                f"where {layout.tokens!r} has {widths[Frame.FULL]}"
            )
    others = {name: value for name, value in native.items() if name not in tensors and name != layout.meta}
    for name, value in others.items():
        problems += _rows_problems(name, value, num_rows, layout)
    meta = native.get(layout.meta)
    if layout.meta in native and not isinstance(meta, Mapping):
        problems.append(f"{layout.meta!r} is of type {type(meta).__name__}; expected a dict")
    raise_problems(problems, layout)
    return NativeFields(
        num_rows=num_rows,
        widths=widths,
        framed=framed,
        dense=dense,
        rows=cast("Mapping[str, Sequence[object]]", others),
        meta=cast("Mapping[str, object] | None", meta),
        arrays=frozenset(name for name in tensors if isinstance(native[name], np.ndarray)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FramedShape:
    """The dimensions of a framed tensor ``[B, *leading, width, *tail]``, with ``leading`` or ``tail`` empty."""

    leading: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, width: int) -> FramedShape:
        """The shape of a tensor whose frame has this width."""
        if tensor.shape[1] == width:
            return cls(leading=(), tail=tuple(tensor.shape[2:]))
        return cls(leading=tuple(tensor.shape[1:-1]), tail=())

    @property
    def num_lines(self) -> int:
        """Stretches of ``width`` columns one row has."""
        return math.prod(self.leading)

    def lanes_per_column(self, dtype: torch.dtype) -> int:
        """How many lanes one column has; a value of 16 bytes is two."""
        return math.prod(self.tail) * (2 if dtype.itemsize == 16 else 1)


def as_lanes(tensor: torch.Tensor, num_lines: int) -> Lanes:
    """The bit patterns of a tensor ``[B, …]`` as unsigned integers ``[B, num_lines, lanes]``."""
    content = as_bytes(tensor).numpy().view(LANE_DTYPES[min(tensor.dtype.itemsize, 8)])
    num_lanes = len(tensor) * num_lines
    return content.reshape(len(tensor), num_lines, len(content) // num_lanes if num_lanes else 0)


def _check_required(native: Native, layout: PaddedLayout) -> None:
    problems = [f"field name {name!r} is no text" for name in native if type(name) is not str]
    for name in layout.required:
        value = native.get(name)
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name!r} is {'absent' if value is None else type(value).__name__}; expected a tensor")
        elif value.dim() != 2:
            problems.append(f"{name!r} has shape {list(value.shape)}; expected [rows, columns]")
    if problems:
        problems.append(f"fields found: {', '.join(sorted(map(repr, native)))}")
    raise_problems(problems, layout)


def _as_tensor(value: object) -> torch.Tensor | None:
    """The tensor, on the CPU, of a tensor or an array of numbers; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if has_plain_bytes(value) else value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative and value.ndim:
        if value.dtype.itemsize > 8 and value.dtype != np.complex128:
            return None
        can_share = value.flags.writeable and min(value.strides) >= 0  # else torch refuses it
        return torch.from_numpy(value if can_share else value.copy())
    return None


def _measure_widths(tensors: Mapping[str, torch.Tensor], layout: PaddedLayout) -> dict[Frame, int]:
    full = tensors[layout.tokens].shape[1]
    known: dict[Frame, int] = {
        frame: tensors[name].shape[1]
        for name, frame in layout.frames.items()
        if frame in (Frame.PROMPT, Frame.RESPONSE) and name in tensors and tensors[name].dim() >= 2
    }
    if Frame.PROMPT not in known and Frame.RESPONSE not in known:
        known = {Frame.PROMPT: 0, Frame.RESPONSE: 0}
    known.setdefault(Frame.RESPONSE, full - known.get(Frame.PROMPT, 0))
    known.setdefault(Frame.PROMPT, full - known[Frame.RESPONSE])
    return {Frame.FULL: full, Frame.SHIFTED: max(full - 1, 0), **known}


def _find_frame(name: str, tensor: torch.Tensor, layout: PaddedLayout, widths: Mapping[Frame, int]) -> Frame | None:
    """The frame of a tensor of two dimensions or more; ``None`` where it is kept as it is.

    A field with a role, and a known one of two dimensions, has its frame whatever its size; a wrong size is then told.
    """
    known = layout.frames.get(name)
    if known is not None and (name in layout.roles or tensor.dim() == 2):
        return known
    order = (Frame.FULL, Frame.SHIFTED, Frame.RESPONSE, Frame.PROMPT) if known is None else (known,)
    # Last comes the last dimension: what has several values per token mostly has them behind it.
    sizes = (tensor.shape[1],) if name in layout.roles else (tensor.shape[1], tensor.shape[-1])
    return next((frame for size in sizes for frame in order if widths[frame] == size > 0), None)


def _tensor_problems(name: str, tensor: torch.Tensor, num_rows: int) -> list[str]:
    if not has_plain_bytes(tensor):
        return [f"{name!r} is {shape_text(tensor)}; expected a dense tensor of values"]
    if tensor.dim() == 0 or len(tensor) != num_rows:
        return [f"{name!r} has shape {list(tensor.shape)}; expected {num_rows} rows"]
    return []


def _rows_problems(name: str, value: object, num_rows: int, layout: PaddedLayout) -> list[str]:
    is_rows = type(value) in (list, tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if not is_rows:
        return [
            f"{name!r} is of type {type(value).__name__}; expected a tensor, an array or a list with one entry per row "
            f"(what concerns the whole batch belongs in {layout.meta!r})"
        ]
    found = len(cast("Sequence[object]", value))
    return [] if found == num_rows else [f"{name!r} has {found} entries; expected {num_rows} rows"]


def raise_problems(problems: list[str], layout: PaddedLayout, remedy: str = "") -> None:
    """Raise one ``BatchError`` listing the problems, the first 20 where there are more, with the remedy."""
    if problems:
        lines = [f"\n  - {problem}" for problem in problems[:MAX_LISTED_PROBLEMS]]
        if len(problems) > MAX_LISTED_PROBLEMS:
            lines.append(f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more")
        lines.append(f"\n{remedy}" if remedy else "")
        raise BatchError(f"batch of layout {layout.name!r} cannot be recorded:{''.join(lines)}")


#: From a framework's batch and a row number to the row's identity.
IdentifyRow: TypeAlias = Callable[[Native, int], SampleIdentity]


def identify_rows(
    native: Native, layout: PaddedLayout, *, num_rows: int, scheduler_id: str, group_size: int | None
) -> list[SampleIdentity]:
    """One identity per row, in the rows' order; raises ``BatchError`` where a field's values cannot make one."""
    if layout.group_ids is None or layout.group_ids not in native:
        size = group_size or 1
        return [_identity(scheduler_id, row // size, 0, (row % size, 0)) for row in range(num_rows)]
    groups = _number_groups(layout.group_ids, _row_values(native, layout.group_ids), layout)
    episodes = _episode_ids(native, layout, num_rows)
    turns = _integers(native, layout.turn_ids, layout, default=[0] * num_rows)
    seen: Counter[tuple[int, int, int]] = Counter()
    counted = []
    for key in zip(groups, episodes, turns, strict=True):
        counted.append(seen[key])
        seen[key] += 1
    envs = _integers(native, layout.env_ids, layout, default=counted)
    return [_identity(scheduler_id, *key) for key in zip(groups, episodes, zip(envs, turns, strict=True), strict=True)]


def read_tags(native: Native, layout: PaddedLayout, num_rows: int) -> tuple[str, ...] | None:
    """The rows' tags; ``None`` where the framework has none, or not a text for each row."""
    if layout.tags is None or layout.tags not in native:
        return None
    values = _row_values(native, layout.tags)
    tags = tuple(value for value in values if type(value) is str)
    return tags if len(tags) == num_rows else None


def _identity(scheduler_id: str, group_id: int, episode_id: int, env_and_turn: tuple[int, int]) -> SampleIdentity:
    env_id, turn = env_and_turn
    return SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)


def _row_values(native: Native, name: str) -> list[object]:
    value = native[name]
    items = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    if not isinstance(items, Sequence):
        return []
    return [item.item() if isinstance(item, np.generic) else item for item in items]


def _number_groups(name: str, values: list[object], layout: PaddedLayout) -> list[int]:
    numbers = [value for value in values if type(value) is int and value >= 0]
    if len(numbers) == len(values):
        return numbers
    unusable = [f"row {row}: {value!r}" for row, value in enumerate(values) if not isinstance(value, str | int | float)]
    if unusable:
        raise_problems([f"{name!r} names no group in {text}; expected a number or a text" for text in unusable], layout)
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [index[value] for value in values]


def _episode_ids(native: Native, layout: PaddedLayout, num_rows: int) -> list[int]:
    name = layout.trajectory_groups
    if name is None or name not in native:
        return [0] * num_rows
    values = _row_values(native, name)
    parts = [value.rsplit("_", 2) if isinstance(value, str) else [] for value in values]
    raise_problems(
        [
            f"{name!r} is {value!r} in row {row}; expected '{{tag}}_{{group}}_{{episode}}_{{seed}}'"
            for row, (value, part) in enumerate(zip(values, parts, strict=True))
            if len(part) != 3 or not part[1].isdecimal()
        ],
        layout,
        "Give the codec a function for the identities: group_ids=lambda native, row: SampleIdentity(…).",
    )
    return [int(part[1]) for part in parts]


def _integers(native: Native, name: str | None, layout: PaddedLayout, *, default: list[int]) -> list[int]:
    if name is None or name not in native:
        return default
    values = _row_values(native, name)
    raise_problems(
        [
            f"{name!r} is {value!r} in row {row}; expected a number of 0 or more"
            for row, value in enumerate(values)
            if type(value) is not int or value < 0
        ],
        layout,
    )
    return [value for value in values if type(value) is int]
