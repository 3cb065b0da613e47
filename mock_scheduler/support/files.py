"""How a file comes to lie where it is read: whole, on the disk, and in one step.

Contract: a file is written aside, in the same folder under a hidden name of its own, fsynced,
and only then given its name; then the folder is fsynced. So its presence is its completeness, and of several writers
one wins as a whole. A crash leaves at most a hidden ``.*.tmp`` file that nothing reads.
All functions that write make the folder where it is missing, and raise ``OSError``.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from mock_scheduler.support.foreign_files import load_json

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """The hidden path to write the file to; at the end of the block it replaces ``path``.

    Where the block raises, ``path`` stays as it was. A device or a folder is never replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    with _temporary(path) as aside:
        yield aside
        _sync(aside)
        # After the fsync: a name that leads to a file must never lead to half of it, even after a crash.
        os.replace(aside, path)
    _sync(path.parent)


def publish_new(path: Path, data: Buffer | Sequence[Buffer], *, mode: int = 0o666) -> None:
    """Write ``data`` to ``path``, never over another file: raises ``FileExistsError`` where the name is taken.

    ``data``: bytes, or pieces in their order, not joined in memory. ``mode``: the file has no other rights at any time.
    """
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    with _temporary(path) as aside:
        _write_pieces(aside, pieces, mode)
        # A link, not a rename, since a rename would replace another writer's file.
        _link_new(aside, path)
    _sync(path.parent)


def save_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, in place of an older file."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def save_json(path: Path, content: Mapping[str, object], *, sort_keys: bool = True) -> None:
    """Write one JSON object, indented, in place of an older file; raises ``ValueError`` for NaN or an infinity."""
    data = encode_json(content, sort_keys=sort_keys)
    with written_aside(path) as aside:
        aside.write_bytes(data)


class AppendedLines:
    """A file to which whole lines are appended, and nothing else; a context manager.

    A line that cannot be written to its end, as on a full disk, is cut off again: the lines before it stay as they
    were. A crash may leave one torn line, the last.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which must be there."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, line: str) -> None:
        """Add one line; ``line`` has no end of its own."""
        end = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, f"{line}\n".encode())
        except BaseException:
            os.ftruncate(self._descriptor, end)
            raise

    def sync(self) -> None:
        """Have all lines on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Have all lines on the disk, and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> AppendedLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def whole_lines(stream: Iterable[bytes], on_torn: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the lines of a file of JSON objects, without their ends.

    Args:
        stream: the lines as a binary file gives them.
        on_torn: is told the number of bytes of a last line that was not written to its end; it is not yielded.
    """
    for line in stream:
        # A JSON object that was cut off is no JSON, so a line whose end alone is missing is whole.
        if not line.endswith(b"\n") and not _is_json(line):
            on_torn(len(line))
            return
        yield line.removesuffix(b"\n")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def encode_json(content: Mapping[str, object], *, sort_keys: bool = True) -> bytes:
    """Gives the bytes that ``save_json`` writes: strict JSON in ASCII, sufficient for every text."""
    return (json.dumps(content, indent=2, sort_keys=sort_keys, allow_nan=False) + "\n").encode("ascii")


def load_json_object(path: Path, *, inside: Path | None = None) -> dict[str, Any]:
    """Read one JSON object through the door for foreign files (``foreign_files``).

    Raises ``OSError`` where the file cannot be read, and ``ValueError`` that goes on from the file's name: ``is not
    JSON: …``, ``is of type list, expected an object``.
    """
    content = load_json(path, inside=inside)
    if not isinstance(content, dict):
        raise ValueError(f"is of type {type(content).__name__}, expected an object")
    return content


def rename_away(path: Path) -> Path:
    """Give a file or folder a hidden name, as an unfinished file has, so it is gone at once and as a whole.

    Returns that name, to be removed. Raises ``FileNotFoundError`` where it is absent.
    """
    aside = _name_aside(path)
    path.rename(aside)
    _sync(path.parent)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of crashed writers in a folder; only for a process that alone writes there."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed stays hidden
        else:
            path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each on the disk when this returns."""
    if folder.is_dir():
        return
    parent = folder.absolute().parent
    make_folder(parent)
    try:
        folder.mkdir()
    except FileExistsError as error:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from error
    _sync(parent)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    make_folder(path.parent)
    aside = _name_aside(path)
    try:
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def _name_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _write_pieces(path: Path, pieces: Sequence[Buffer], mode: int) -> None:
    """Write a new file and have it on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for piece in pieces:
            _write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Buffer) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _link_new(aside: Path, path: Path) -> None:
    """Give the file its name, failing where the name is taken."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # File systems without hard links: between this look and the rename another writer could slip in.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists", str(path)) from error
        os.rename(aside, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
