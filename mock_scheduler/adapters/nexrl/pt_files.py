"""Reads a ``.pt`` file of another party: plain containers and tensors, none of which takes more than the file holds.

Contract: ``torch.load`` with ``weights_only=True`` runs no code, but believes sizes. So only a zip archive of stored
entries is read, each entry within the file and with its checksum; torch reads a copy of these entries and nothing
else. A tensor must lie in its own entry, every element once. The few functions that torch's reader still calls and
that make large values out of small ones are refused.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.support.foreign_files import open_foreign
from mock_scheduler.support.tensor_bytes import has_plain_bytes, shape_text

#: The limit of one file of a dump.
MAX_DUMP_BYTES = 64 * 2**30

#: What torch.load raises for bytes that it cannot make sense of.
_BROKEN_FILE = (
    *(RuntimeError, ValueError, EOFError, KeyError, AttributeError, IndexError, TypeError, AssertionError),
    *(OverflowError, MemoryError, struct.error),
)
#: Functions that torch's reader (2.13) allows: one doubles a text, as often as it is called, and one makes zeros.
_GROWING = re.compile(rb"c(?:_codecs\nencode|(?:__builtin__|builtins)\nbytearray)\n")
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_MAX_DEPTH = 100
#: Values that a file may have for each of its bytes; more than one where several places hold the same list.
_VALUES_PER_BYTE = 4


def read_pt(path: Path, *, inside: Path | None = None) -> object:
    """Reads the content, tensors on the CPU; ``inside``: no link leads out of this folder.

    Raises:
        TraceError: it is damaged, would run code, or claims more than it holds.
        OSError: it cannot be opened.
    """
    with open_foreign(path, inside=inside, max_bytes=MAX_DUMP_BYTES, what="a file of a debug dump") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        archive = _copy_entries(stream, path, size_bytes)
    content = _load(archive, path)
    _check_content(content, path, size_bytes)
    return content


def _copy_entries(stream: BinaryIO, path: Path, size_bytes: int) -> io.BytesIO:
    """Gives a new archive of the entries: torch finds them by a reader of its own, which could see other ones."""
    copy = io.BytesIO()
    try:
        with zipfile.ZipFile(stream) as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
            entries = source.infolist()
            _check_entries(entries, path, size_bytes)
            for entry in entries:
                data = source.read(entry)
                if entry.filename.endswith(".pkl") and _GROWING.search(data):
                    raise TraceError(
                        f"{path}: {entry.filename} calls a function that makes large values: it is refused"
                    )
                target.writestr(entry.filename, data)
    except zipfile.BadZipFile as error:
        changed = re.fullmatch(r"Bad CRC-32 for file '(.*)'", str(error))
        if changed is not None:
            raise TraceError(
                f"{path} has changed since it was written: {changed[1]} in it does not fit its checksum"
            ) from error
        raise _broken(path, error) from error
    except (NotImplementedError, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise _broken(path, error) from error
    copy.seek(0)
    return copy


def _check_entries(entries: list[zipfile.ZipInfo], path: Path, size_bytes: int) -> None:
    for entry in entries:
        # torch.save stores its entries; a deflated one may become a thousand times as large.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise TraceError(f"{path}: {entry.filename} in it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > size_bytes:
        raise TraceError(f"{path} has {size_bytes} bytes, and its entries claim more: they overlap")
    names = {entry.filename for entry in entries}
    if len(names) != len(entries):
        raise TraceError(f"{path} has two entries of one name")


def _load(archive: io.BytesIO, path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that torch did not write, which is refused below
            return torch.load(archive, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TraceError(
            f"{path} needs pickle to be read, which can run any code, and is refused: {_refused(error)} Save it anew "
            "with plain Python values and tensors only"
        ) from error
    except _BROKEN_FILE as error:
        raise _broken(path, error) from error


def _check_content(content: object, path: Path, size_bytes: int) -> None:
    """Raises ``TraceError`` where a value is neither plain nor a plain tensor, or all of them are more than the file.

    One list may stand in several places, and so hold more values than a file has bytes, or itself.
    """
    stack: list[tuple[object, int]] = [(content, 0)]
    num_values = num_bytes = 0
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if isinstance(value, torch.Tensor):
            num_bytes += _measure_tensor(value, path)
        elif isinstance(value, dict):
            stack.extend((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value)
        elif not isinstance(value, _PLAIN):
            raise TraceError(f"{path} holds a {type(value).__name__}; expected plain values and tensors")
        if depth > _MAX_DEPTH or max(num_values, num_bytes) > _VALUES_PER_BYTE * size_bytes:
            raise TraceError(
                f"{path} has {size_bytes} bytes; the values in it are more, or lie in each other without end"
            )


def _measure_tensor(tensor: torch.Tensor, path: Path) -> int:
    """Gives the bytes of a tensor's values; raises where it is not one of as many values as it has in the file."""
    if not has_plain_bytes(tensor):
        raise TraceError(f"{path} holds {shape_text(tensor)}; expected a dense tensor of plain numbers")
    num_bytes, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if num_bytes > stored:
        raise TraceError(
            f"{path} holds {shape_text(tensor)}, of which it stores {stored} bytes: the others are claimed"
        )
    return num_bytes


def _broken(path: Path, error: Exception) -> TraceError:
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return TraceError(f"{path} is no whole file of torch.save: {first_line}")


def _refused(error: pickle.UnpicklingError) -> str:
    """Torch's finding in the file, without its advice, first of all to load it unsafely (torch 2.13)."""
    advice = ("Weights only load failed", "Please file an issue", "Check the documentation", "(1)", "(2)")
    lines = [line.strip() for line in str(error).splitlines()]
    found = " ".join(line.split(" Please use ")[0] for line in lines if line and not line.startswith(advice))
    return f"{found.rstrip('.')}." if found else "it is no file of torch.save."
