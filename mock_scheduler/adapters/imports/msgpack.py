"""Reads MessagePack: plain data, and no extension types.

Contract: everything that comes out was in the bytes; a length that claims more than is left refuses them, and so does
nesting deeper than ``_MAX_DEPTH``. Source: the specification at github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from typing import Any

_MAX_DEPTH = 32

_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_LENGTHS = {0: ">B", 1: ">H", 2: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class MessagePackError(ValueError):
    """Bytes are no MessagePack, or claim more than is there; the text goes on from the file's name."""


def read_msgpack(data: bytes) -> Any:  # noqa: ANN401 - data of any kind
    """Reads one value that fills the bytes; raises ``MessagePackError``."""
    reader = _Reader(memoryview(data))
    value = reader.read(0)
    if reader.position != len(data):
        raise MessagePackError(f"has {len(data) - reader.position} bytes after its end")
    return value


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def read(self, depth: int) -> Any:  # noqa: ANN401 - data of any kind
        if depth > _MAX_DEPTH:
            raise MessagePackError(f"has lists more than {_MAX_DEPTH} deep")
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _FIXED:
            return self._number(_FIXED[code])
        if code >= 0xA0 and code < 0xC0:
            return self._text(code & 0x1F)
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._list(code & 0x0F, depth)
        return self._read_sized(code, depth)

    def _read_sized(self, code: int, depth: int) -> Any:  # noqa: ANN401 - data of any kind
        if 0xC4 <= code <= 0xC6:
            return bytes(self._take(int(self._number(_LENGTHS[code - 0xC4]))))
        if 0xD9 <= code <= 0xDB:
            return self._text(int(self._number(_LENGTHS[code - 0xD9])))
        if code in (0xDC, 0xDD):
            return self._list(int(self._number(_LENGTHS[code - 0xDB])), depth)
        if code in (0xDE, 0xDF):
            return self._map(int(self._number(_LENGTHS[code - 0xDD])), depth)
        raise MessagePackError(f"has the byte {code:#x} at {self.position - 1}, an extension or none; it is not read")

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise MessagePackError(f"claims {count} bytes at {self.position} of {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _number(self, form: str) -> int | float:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value  # type: ignore[no-any-return]

    def _text(self, count: int) -> str:
        try:
            return str(self._take(count), "utf-8")
        except UnicodeDecodeError as error:
            raise MessagePackError(f"has a text that is no UTF-8: {error}") from error

    def _check_count(self, count: int) -> None:
        # An item takes a byte at least.
        if count > len(self._data) - self.position:
            raise MessagePackError(f"claims {count} items at {self.position} of {len(self._data)} bytes")

    def _list(self, count: int, depth: int) -> list[Any]:
        self._check_count(count)
        return [self.read(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        self._check_count(count)
        items = {}
        for _ in range(count):
            key = self.read(depth + 1)
            if not isinstance(key, str | int):
                raise MessagePackError(f"has a key that is a {type(key).__name__}")
            items[key] = self.read(depth + 1)
        return items
