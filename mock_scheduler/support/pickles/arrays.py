"""Makes NumPy arrays of what a pickle describes: a dtype by its code, a shape, and bytes that are there.

Contract: pure functions of inert data (``data``); no object of the pickle is called. An array has numbers,
bools, texts or plain objects, and as many bytes or objects as its shape says.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.support.pickles.data import Record
from mock_scheduler.support.text import shorten

#: Numbers of one to sixteen bytes, bools and texts; never objects of a class, records or dates.
_DTYPE = re.compile(r"[biuf](?:1|2|4|8)|c(?:8|16)|[US]\d{1,6}|O8")
#: As which protocol 2 writes no bytes at all.
NO_BYTES = frozenset({"__builtin__.bytes", "builtins.bytes"})


class ArrayProblemError(ValueError):
    """A description of an array claims more than is there, or is of another form."""


def shape_array(content: object, dtype: np.dtype[Any], shape: object, order: str) -> npt.NDArray[Any]:
    """Makes an array; ``content``: its bytes, or the list of its objects, each made already."""
    sizes = read_numbers(shape, "a shape")
    numel, way = math.prod(sizes), "F" if order == "F" else "C"
    if dtype.kind == "O":
        if not isinstance(content, list) or len(content) != numel:
            raise ArrayProblemError(f"has an array {list(sizes)} of objects with other content")
        array: npt.NDArray[Any] = np.empty(numel, dtype=object)
        for number, item in enumerate(content):  # by number: NumPy would take lists apart
            array[number] = item
    else:
        stored = read_bytes(content)
        if len(stored) != numel * dtype.itemsize:
            raise ArrayProblemError(
                f"holds an array {dtype} {list(sizes)}, of which it stores {len(stored)} bytes: the others are claimed"
            )
        array = np.frombuffer(bytearray(stored), dtype=dtype) if stored else np.empty(0, dtype=dtype)
    return array.reshape(sizes, order="F") if way == "F" else array.reshape(sizes)


def read_dtype(described: object) -> np.dtype[Any]:
    """Makes a dtype of its description."""
    code = described.arguments[0] if isinstance(described, Record) and described.arguments else None
    if not isinstance(described, Record) or described.kind.text != "numpy.dtype" or not isinstance(code, str):
        raise ArrayProblemError("has an array without a dtype")
    if not _DTYPE.fullmatch(code):
        raise ArrayProblemError(f"has an array of dtype {shorten(code, 20)!r}; expected numbers, bools, texts, objects")
    state = described.state
    if isinstance(state, tuple) and any(part is not None for part in state[2:5]):
        raise ArrayProblemError("has an array of records; expected numbers, bools, texts, objects")
    is_swapped = isinstance(state, tuple) and len(state) > 1 and state[1] == ">"
    return np.dtype(object) if code == "O8" else np.dtype(code).newbyteorder(">" if is_swapped else "=")


def read_bytes(content: object) -> bytes:
    """Gives bytes, as a pickle of any protocol writes them."""
    if isinstance(content, bytes | bytearray):
        return bytes(content)
    if isinstance(content, Record) and content.kind.text in NO_BYTES and not content.arguments:
        return b""
    if isinstance(content, Record) and content.kind.text == "_codecs.encode" and len(content.arguments) == 2:
        text, encoding = content.arguments
        # No other encoding gives a byte for each character.
        if isinstance(text, str) and encoding == "latin1":
            return text.encode("latin-1")
    raise ArrayProblemError("calls a function that makes large values: it is refused")


def read_numbers(values: object, what: str) -> tuple[int, ...]:
    """Gives a tuple of sizes; ``what``: they, in words."""
    values = values.arguments[0] if isinstance(values, Record) and values.kind.text == "torch.Size" else values
    if not isinstance(values, list | tuple) or any(type(number) is not int or number < 0 for number in values):
        raise ArrayProblemError(f"has {what} {_describe(values)}; expected whole numbers of at least 0")
    return tuple(values)


def _describe(values: object) -> str:
    """Plain numbers, or the type alone: the text of lists that share lists may be without end."""
    if isinstance(values, list | tuple) and all(type(number) is int and abs(number) < 2**64 for number in values):
        return shorten(str(values), 60)
    return f"that is a {type(values).__name__} of other things"
