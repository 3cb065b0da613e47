"""Reads what ``torch.save`` wrote: a zip archive of stored entries, by a reader that runs nothing of it.

Contract: torch itself never sees the file. Each entry lies within the file and has its checksum; none is compressed;
the pickle in it makes tensors, arrays and plain data alone (``values``), and what it claims must be there.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.foreign_files import open_foreign, read_bytes
from mock_scheduler.support.pickles.data import PickledDataError, UnlistedNameError
from mock_scheduler.support.pickles.values import MAX_VALUES_BYTES, read_values

#: The limit of one file.
MAX_TORCH_BYTES = 64 * 2**30

_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, OverflowError, struct.error)


def read_torch_file(
    path: Path,
    *,
    inside: Path | None = None,
    kept: Collection[str] = (),
    what: str = "such a file",
    max_expanded_bytes: int = 0,
) -> Any:  # noqa: ANN401 - data of any kind
    """Reads the content, tensors on the CPU.

    Args:
        path: of the file.
        inside: no link leads out of this folder; ``None``: the user named this file.
        kept: globals whose objects stay a ``Record``.
        what: the file in words.
        max_expanded_bytes: of tensors that repeat elements of their storage; 0: such a file is refused.

    Raises:
        ForeignFileError: it is damaged, would run code, or claims more than it holds; the text begins with the path.
        OSError: it cannot be opened.
    """
    with open_foreign(path, inside=inside, max_bytes=MAX_TORCH_BYTES, what=what) as stream:
        return _read(stream, str(path), kept, max_expanded_bytes)


def read_torch_bytes(data: bytes, where: str, *, kept: Collection[str] = ()) -> Any:  # noqa: ANN401 - data of any kind
    """Reads an archive that lies in another file; ``where`` begins messages. Raises as ``read_torch_file``."""
    return _read(io.BytesIO(data), where, kept)


def read_pickle_file(
    path: Path, *, inside: Path | None = None, kept: Collection[str] = (), what: str = "such a file"
) -> Any:  # noqa: ANN401 - data of any kind
    """Reads a plain pickle; arguments and errors are as in ``read_torch_file``."""
    data = read_bytes(path, inside=inside, max_bytes=MAX_VALUES_BYTES, what=what)
    try:
        return read_values(data, size_bytes=len(data), kept=kept)
    except PickledDataError as error:
        raise ForeignFileError(f"{path} {_explain(error)}") from error


def _read(stream: BinaryIO, where: str, kept: Collection[str], max_expanded_bytes: int = 0) -> Any:  # noqa: ANN401 - data of any kind
    size_bytes = stream.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            return _read_archive(archive, where, size_bytes, kept, max_expanded_bytes)
    except ForeignFileError:
        raise
    except PickledDataError as error:
        raise ForeignFileError(f"{where} {error}") from error
    except _BROKEN as error:
        changed = re.fullmatch(r"Bad CRC-32 for file '(.*)'", str(error))
        if changed is not None:
            text = f"{where} has changed since it was written: {changed[1]} in it does not fit its checksum"
            raise ForeignFileError(text) from error
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ForeignFileError(f"{where} is no whole file of torch.save: {first_line}") from error


def _read_archive(
    archive: zipfile.ZipFile, where: str, size_bytes: int, kept: Collection[str], max_expanded_bytes: int
) -> Any:  # noqa: ANN401 - data of any kind
    entries = archive.infolist()
    _check_entries(entries, where, size_bytes)
    pickles = [entry.filename for entry in entries if re.fullmatch(r"[^/]+/data\.pkl", entry.filename)]
    if len(pickles) != 1:
        raise ForeignFileError(f"{where} is no whole file of torch.save: it has {len(pickles)} entries data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    names = {entry.filename for entry in entries}
    if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder") != b"little":
        raise ForeignFileError(f"{where} was written on a machine of the other byte order; it is not read")
    storages = _Storages(archive, prefix=f"{prefix}data/", names=names)
    try:
        return read_values(
            archive.read(pickles[0]),
            size_bytes=size_bytes,
            storages=storages,
            kept=kept,
            max_expanded_bytes=max_expanded_bytes,
        )
    except PickledDataError as error:
        raise ForeignFileError(f"{where}: {pickles[0]} {_explain(error)}") from error


def _explain(error: PickledDataError) -> str:
    if not isinstance(error, UnlistedNameError):
        return str(error)
    return f"{error}. Only tensors, arrays and plain Python values can be read safely: save it anew with these only"


def _check_entries(entries: list[zipfile.ZipInfo], where: str, size_bytes: int) -> None:
    for entry in entries:
        # torch.save stores its entries; a deflated one may become a thousand times as large.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ForeignFileError(f"{where}: {entry.filename} in it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > size_bytes:
        raise ForeignFileError(f"{where} has {size_bytes} bytes, and its entries claim more: they overlap")
    if len({entry.filename for entry in entries}) != len(entries):
        raise ForeignFileError(f"{where} has two entries of one name")


class _Storages(Mapping[str, "npt.NDArray[np.uint8]"]):
    """The storages of an archive, each read when it is first asked for; a key is a name, never a path."""

    def __init__(self, archive: zipfile.ZipFile, *, prefix: str, names: Collection[str]) -> None:
        self._archive, self._prefix = archive, prefix
        self._keys = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        self._read: dict[str, npt.NDArray[np.uint8]] = {}

    def __getitem__(self, key: str) -> npt.NDArray[np.uint8]:
        if key not in self._keys:
            raise KeyError(key)
        if key not in self._read:
            self._read[key] = np.frombuffer(bytearray(self._archive.read(self._prefix + key)), dtype=np.uint8)
        return self._read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
