"""Makes tensors, arrays and plain data of what a pickle describes; nothing of the pickle is run.

Contract: ``data`` gives inert data, and this module alone turns the closed list ``VALUE_NAMES`` of it into
values, by code of its own: a tensor out of a storage that is there, an array out of bytes that are there, ``dict`` for
``OrderedDict``. A caller may keep further objects as ``Record``, whose arguments and states are made in the same way.
A tensor lies within its storage with every element once, unless a caller states how large those may be that repeat
elements; an array has as many bytes as its shape says; and all values together, each counted wherever it stands, are no
more than the file's size allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.support.pickles.arrays import (
    NO_BYTES,
    ArrayProblemError,
    read_bytes,
    read_dtype,
    read_numbers,
    shape_array,
)
from mock_scheduler.support.pickles.data import Name, PickledDataError, Record, read_pickled_data
from mock_scheduler.support.tensor_bytes import DTYPES, find_dtype, from_bytes
from mock_scheduler.support.text import shorten

#: The largest pickle of rollouts that is read.
MAX_VALUES_BYTES = 8 * 2**30
#: Values that a file may have for each of its bytes; more than one where several places hold the same list.
_VALUES_PER_BYTE = 4
#: Characters that weigh as much as one value: short names, as of a status, stand in every row of a small file.
_TEXT_PER_VALUE = 8
_MAX_DEPTH = 100
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

_STORAGES = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.storage.UntypedStorage": "uint8",
}
_ARRAY_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_FROM_BUFFER = ("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer")
_TYPED_TENSOR = "torch._tensor._rebuild_from_type_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_NESTED = "torch.nested._internal.nested_tensor"

#: Every global that a pickle of values may name.
VALUE_NAMES = frozenset(
    {
        *_STORAGES,
        *(f"torch.{name}" for name in DTYPES),
        *("torch.Size", "torch.device", "torch.Tensor"),
        *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", _TYPED_TENSOR, _PARAMETER),
        *("torch._utils._rebuild_nested_tensor", f"{_NESTED}._rebuild_njt", f"{_NESTED}.NestedTensor"),
        # Among the marks of a nested tensor, which are not read; nothing is made of them elsewhere.
        *("torch._dynamo.decorators._DimRange", "__builtin__.set", "builtins.set"),
        *("numpy.dtype", "numpy.ndarray", *_FROM_BUFFER),
        *(f"{module}.{name}" for module in _ARRAY_MODULES for name in ("_reconstruct", "scalar")),
        *("_codecs.encode", "collections.OrderedDict", *NO_BYTES),
    }
)
#: The bytes of a file's storages by their keys.
Storages = Mapping[str, npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Holds a nested tensor as its rows, which differ in their first dimension."""

    rows: tuple[torch.Tensor, ...]


def read_values(
    data: bytes,
    *,
    size_bytes: int,
    storages: Storages | None = None,
    kept: Collection[str] = (),
    max_expanded_bytes: int = 0,
) -> Any:  # noqa: ANN401 - data of any kind
    """Reads one pickle of tensors, arrays and plain data.

    Args:
        data: the whole pickle.
        size_bytes: of the file that it is of; bounds the values.
        storages: the storages that the file has beside it; ``None``: it has none.
        kept: further globals; objects of them stay a ``Record``.
        max_expanded_bytes: of all tensors together that repeat elements of their storage; they stay views of it.

    Raises:
        PickledDataError: it would run code, claims more than is there, or has a value of another kind; the text goes on
            from the file's name.
    """
    described = read_pickled_data(
        data, names=VALUE_NAMES | set(kept), has_persistent_ids=storages is not None, max_bytes=MAX_VALUES_BYTES
    )
    builder = _Builder(
        storages=storages or {},
        kept=frozenset(kept),
        max_weight=_VALUES_PER_BYTE * size_bytes,
        max_expanded_bytes=max_expanded_bytes,
    )
    return builder.build(described)[0]


class _Builder:
    """Makes the values of one file; each object once, however often it occurs."""

    def __init__(self, *, storages: Storages, kept: frozenset[str], max_weight: int, max_expanded_bytes: int) -> None:
        self._storages, self._kept, self._max_weight = storages, kept, max_weight
        self._left_expanded_bytes = max_expanded_bytes
        self._made: dict[int, tuple[Any, int]] = {}
        # Objects whose addresses ``_made`` has: a temporary one would give its address to another.
        self._held: list[object] = []
        self._place: list[str] = []

    def build(self, value: Any) -> tuple[Any, int]:  # noqa: ANN401 - data of any kind
        """Makes a value and its weight: how many values and bytes it has, each counted wherever it stands."""
        if type(value) in _PLAIN:
            return value, _weigh(value)
        made = self._made.get(id(value))
        if made is None:
            if len(self._place) > _MAX_DEPTH:
                raise self._endless()
            made = self._build_new(value)
            self._made[id(value)] = made
            self._held.append(value)
        if made[1] > self._max_weight:
            raise self._endless()
        return made

    def _build_new(self, value: Any) -> tuple[Any, int]:  # noqa: ANN401 - data of any kind
        if isinstance(value, Record):
            return self._build_record(value)
        if isinstance(value, dict):
            return self._build_dict(value)
        if isinstance(value, list | tuple):
            return self._build_items(value)
        if isinstance(value, Name):
            return self._build_name(value), 1
        if isinstance(value, bytearray):
            return bytes(value), len(value)
        raise self._problem(f"has a {type(value).__name__}; expected tensors, arrays and plain data")

    def _build_items(self, items: list[Any] | tuple[Any, ...]) -> tuple[Any, int]:
        types = set(map(type, items))
        if types <= _PLAIN:
            return items, 1 + (len(items) if types.isdisjoint((str, bytes)) else sum(map(_weigh, items)))
        made = []
        for number, item in enumerate(items):
            with self._at(f"[{number}]"):
                made.append(self.build(item))
        values = [value for value, _ in made]
        return (values if isinstance(items, list) else tuple(values)), 1 + sum(weight for _, weight in made)

    def _build_dict(self, items: Mapping[Any, Any]) -> tuple[dict[Any, Any], int]:
        values, total = {}, 1
        for key, item in items.items():
            if isinstance(key, Record):
                raise self._problem(f"has a key that is a {key.kind.text}; expected a text or a number")
            with self._at(f".{shorten(str(key), 40)}"):
                values[key], weight = self.build(item)
            total += _weigh(key) + weight
        return values, total

    def _build_name(self, name: Name) -> Any:  # noqa: ANN401 - a dtype or a name
        if name.text in self._kept:
            return name
        dtype = DTYPES.get(name.text.removeprefix("torch."))
        if dtype is None:
            raise self._problem(f"holds {name.text} itself; expected tensors, arrays and plain data")
        return dtype

    def _build_record(self, record: Record) -> tuple[Any, int]:
        kind = record.kind.text
        if kind in self._kept:
            return self._build_kept(record)
        if kind == "torch.device":
            return self.build(record.arguments)
        if kind == "collections.OrderedDict":
            return self._build_dict(record.entries)
        if kind == "torch.Size":
            return self._size_of(record), 1
        maker = _MAKERS.get(kind)
        if maker is None:
            raise self._problem(f"makes an object of {kind}; expected tensors, arrays and plain data")
        try:
            return maker(self, record)
        except ArrayProblemError as error:
            raise self._problem(str(error)) from None
        except PickledDataError:
            raise
        # What a description that contradicts itself makes torch and NumPy raise.
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, AttributeError) as error:
            raise self._problem(f"has a {kind} that contradicts itself: {shorten(str(error), 120)}") from error

    def _size_of(self, record: Record) -> tuple[int, ...]:
        try:
            return read_numbers(record.arguments[0] if record.arguments else (), "a size")
        except ArrayProblemError as error:
            raise self._problem(str(error)) from None

    def _build_kept(self, record: Record) -> tuple[Record, int]:
        with self._at(f"<{record.kind.text}>"):
            arguments, first = self.build(record.arguments)
            state, second = self.build(record.state)
            entries, third = self.build(record.entries)
        made = Record(kind=record.kind, arguments=arguments, state=state, entries=entries)
        return made, first + second + third

    def make_tensor(self, record: Record) -> tuple[torch.Tensor, int]:
        """Returns ``_rebuild_tensor_v2`` and ``_v3``: storage, offset, size, strides, and of the latter the dtype."""
        storage, offset, size, strides, *rest = record.arguments
        if isinstance(storage, Record):
            raise self._problem(
                f"has a tensor whose bytes are in a pickle of their own ({storage.kind.text}), as plain pickles have; "
                "it is not read"
            )
        kind, key, numel = self._read_storage(storage)
        dtype = find_dtype(_STORAGES[kind]) if len(rest) < 3 or not isinstance(rest[2], Name) else self._dtype(rest[2])
        content = self._storages.get(key)
        if content is None:
            raise self._problem(f"has a tensor of storage {shorten(key, 40)!r}, which the file does not have")
        width = 1 if kind == "torch.storage.UntypedStorage" else dtype.itemsize
        if numel * width != len(content):
            raise self._problem(f"claims a storage of {numel * width} bytes, and storage {key!r} has {len(content)}")
        return self._place_tensor(content, dtype, offset, size, strides)

    def _place_tensor(
        self, content: npt.NDArray[np.uint8], dtype: torch.dtype, offset: object, size: object, strides: object
    ) -> tuple[torch.Tensor, int]:
        sizes, steps = read_numbers(size, "a size"), read_numbers(strides, "strides")
        (start,) = read_numbers((offset,), "an offset")
        if len(sizes) != len(steps):
            raise self._problem(f"has a tensor of size {list(sizes)} and strides {list(steps)}")
        numel, stored = math.prod(sizes), len(content) // dtype.itemsize
        last = start + sum((count - 1) * step for count, step in zip(sizes, steps, strict=True)) if numel else start
        is_expanded = numel > stored
        if is_expanded:
            self._left_expanded_bytes -= numel * dtype.itemsize
        if numel and (last >= stored or (is_expanded and self._left_expanded_bytes < 0)):
            raise self._problem(
                f"holds {dtype} {list(sizes)} on cpu, of which it stores {len(content)} bytes: the others are claimed"
            )
        if not numel:
            return torch.empty(sizes, dtype=dtype), 1
        whole = from_bytes(content[: stored * dtype.itemsize], dtype, (stored,))
        if dtype is torch.bool and int(content.max()) > 1:
            raise self._problem("has a bool tensor with other bytes than 0 and 1")
        return whole.as_strided(sizes, steps, start), 1 + min(numel, stored) * dtype.itemsize

    def make_typed_tensor(self, record: Record) -> tuple[Any, int]:
        """Returns ``_rebuild_from_type_v2``: a function, the tensor's class, the function's arguments, marks."""
        function, kind, arguments, _marks = record.arguments
        if kind not in (Name("torch.Tensor"), Name(f"{_NESTED}.NestedTensor")) or not isinstance(function, Name):
            raise self._problem("has a tensor of a class of its own; expected torch.Tensor")
        return self._build_record(Record(kind=function, arguments=arguments))

    def make_parameter(self, record: Record) -> tuple[Any, int]:
        """``_rebuild_parameter``: its tensor, whether it wants a gradient, hooks."""
        return self.build(record.arguments[0])

    def make_jagged(self, record: Record) -> tuple[Jagged, int]:
        """``_rebuild_njt``: all rows one after another, and where each begins."""
        fields = record.arguments[0]
        if fields.get("lengths") is not None or fields.get("_ragged_idx", 1) != 1:
            raise self._problem("has a nested tensor with holes, or ragged in a later dimension; it is not read")
        (values, weight), (offsets, _) = self.build(fields["values"]), self.build(fields["offsets"])
        bounds = offsets.tolist()
        if not bounds or bounds[0] != 0 or bounds[-1] != len(values) or sorted(bounds) != bounds:
            raise self._problem(f"has a nested tensor of {len(values)} values whose offsets do not rise from 0 to it")
        return Jagged(torch.split(values, offsets.diff().tolist())), weight

    def make_nested(self, record: Record) -> tuple[Jagged, int]:
        """Returns ``_rebuild_nested_tensor``: all bytes, and each row's size, strides and offset."""
        (values, weight), *about = (self.build(argument) for argument in record.arguments)
        sizes, strides, offsets = (made.tolist() for made, _ in about)
        content = values.reshape(-1).view(torch.uint8).numpy() if len(values) else np.empty(0, dtype=np.uint8)
        rows = [
            self._place_tensor(content, values.dtype, offset, tuple(size), tuple(steps))
            for size, steps, offset in zip(sizes, strides, offsets, strict=True)
        ]
        return Jagged(tuple(row for row, _ in rows)), weight + sum(own for _, own in rows)

    def make_array(self, record: Record) -> tuple[npt.NDArray[Any], int]:
        """``_reconstruct`` with the state that NumPy gives: version, shape, dtype, order, content."""
        _version, shape, described, is_fortran, content = record.state
        return self._shape_array(content, described, shape, "F" if is_fortran else "C")

    def make_array_of_buffer(self, record: Record) -> tuple[npt.NDArray[Any], int]:
        """Returns ``_frombuffer``: content, dtype, shape, order."""
        content, described, shape, order = record.arguments
        return self._shape_array(content, described, shape, order)

    def make_scalar(self, record: Record) -> tuple[Any, int]:
        """Returns one value of NumPy, as an array's element."""
        described, content = record.arguments
        array, weight = self._shape_array(content, described, (1,), "C")
        return array[0], weight

    def _shape_array(
        self, content: object, described: object, shape: object, order: str
    ) -> tuple[npt.NDArray[Any], int]:
        dtype = read_dtype(described)
        items, weight = self.build(content) if dtype.kind == "O" else (content, 0)
        array = shape_array(items, dtype, shape, order)
        return array, 1 + (weight if dtype.kind == "O" else array.nbytes)

    def make_bytes(self, record: Record) -> tuple[bytes, int]:
        """Returns ``_codecs.encode``, as which protocol 2 writes bytes."""
        content = read_bytes(record)
        return content, len(content)

    def _read_storage(self, storage: object) -> tuple[str, str, int]:
        if isinstance(storage, tuple) and len(storage) == 5 and storage[0] == "storage":
            _, kind, key, _location, numel = storage
            if isinstance(kind, Name) and kind.text in _STORAGES and type(key) is str and type(numel) is int:
                return kind.text, key, numel
        raise self._problem("has a tensor without a storage")

    def _dtype(self, name: Name) -> torch.dtype:
        return find_dtype(name.text.removeprefix("torch."))

    @contextmanager
    def _at(self, place: str) -> Iterator[None]:
        self._place.append(place)
        yield
        self._place.pop()

    def _problem(self, text: str) -> PickledDataError:
        place = "".join(self._place).lstrip(".")
        return PickledDataError(f"{text} (at {place})" if place else text)

    def _endless(self) -> PickledDataError:
        size = self._max_weight // _VALUES_PER_BYTE
        return PickledDataError(f"has {size} bytes; the values in it are more, or lie in each other without end")


def _weigh(value: object) -> int:
    """A plain value's weight; a text's is of its length, since one text may stand in many places."""
    return 1 + len(value) // _TEXT_PER_VALUE if isinstance(value, str | bytes) else 1


_MAKERS: Mapping[str, Callable[[_Builder, Record], tuple[Any, int]]] = {
    "torch._utils._rebuild_tensor_v2": _Builder.make_tensor,
    "torch._utils._rebuild_tensor_v3": _Builder.make_tensor,
    "torch._utils._rebuild_nested_tensor": _Builder.make_nested,
    _TYPED_TENSOR: _Builder.make_typed_tensor,
    _PARAMETER: _Builder.make_parameter,
    f"{_NESTED}._rebuild_njt": _Builder.make_jagged,
    **dict.fromkeys(("_codecs.encode", *NO_BYTES), _Builder.make_bytes),
    **dict.fromkeys(_FROM_BUFFER, _Builder.make_array_of_buffer),
    **{f"{module}._reconstruct": _Builder.make_array for module in _ARRAY_MODULES},
    **{f"{module}.scalar": _Builder.make_scalar for module in _ARRAY_MODULES},
}
