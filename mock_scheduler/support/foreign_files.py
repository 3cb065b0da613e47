"""The one door through which files of another party are opened: recordings, traces, run folders, dumps, vocabularies.

Contract: only a regular file is opened, and opening never waits: a pipe, a socket, a device or a folder is refused by
name. A link is followed where the user named it. With ``inside``, a link may not lead out of that folder; nor out of a
copied one, in which a hard link cannot be told from the file that it names. A reader states how much it takes, and a
larger file is refused before a byte of it is read. ``ForeignFileError`` says all of this; it is an ``OSError``, so
whoever catches errors of reading catches it too.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from mock_scheduler.errors import ConfigError, ForeignFileError

#: The limit of one JSON or YAML document: a run's summary, bounds, configuration, fingerprint or vocabulary.
MAX_DOCUMENT_BYTES = 64 * 2**20
#: The limit of one line of a log that is read line by line.
MAX_LINE_BYTES = 16 * 2**20

_PIECE_BYTES = 2**20
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, *, inside: Path | None = None, shown_path: str | None = None) -> int:
    """Opens a file to read, and gives its descriptor, for the caller to close.

    Args:
        path: of the file.
        inside: the folder that it must lie in, links followed; ``None``: the user named this file, wherever it leads.
        shown_path: the path for messages; ``None``: ``path``.

    Raises:
        ForeignFileError: it is no regular file, or lies outside.
        OSError: it is absent or cannot be opened.
    """
    descriptor = os.open(path, _FLAGS) if inside is None else _open_inside(str(path), str(inside))
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise ForeignFileError(f"{shown_path or path} is {kind}, where a regular file is expected: remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def open_foreign(
    path: str | Path, *, inside: Path | None = None, max_bytes: int | None = None, what: str = "such a file"
) -> Iterator[BufferedReader]:
    """Opens a file as a stream of bytes; raises as ``open_regular``, and where it has more than ``max_bytes``.

    ``what``: the file in words, as in ``a JSON document``.
    """
    with os.fdopen(open_regular(path, inside=inside), "rb") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if max_bytes is not None and size_bytes > max_bytes:
            raise _too_large(path, f"{size_bytes} bytes", max_bytes, what)
        yield stream


def read_bytes(
    path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES, inside: Path | None = None, what: str = "a document"
) -> bytes:
    """Reads a whole file; raises as ``open_foreign``."""
    with open_foreign(path, inside=inside, max_bytes=max_bytes, what=what) as stream:
        pieces = [stream.read(os.fstat(stream.fileno()).st_size)]
        # It may have grown since, and a file of the kernel says a size of 0.
        for piece in read_pieces(stream, None):
            pieces.append(piece)
            if sum(map(len, pieces)) > max_bytes:
                raise _too_large(path, "more", max_bytes, what)
    return b"".join(pieces)


def read_pieces(stream: BinaryIO, num_bytes: int | None) -> Iterator[bytes]:
    """Yields the next bytes of a stream in pieces; ``None``: up to its end."""
    left = sys.maxsize if num_bytes is None else num_bytes
    while piece := stream.read(min(left, _PIECE_BYTES)):
        left -= len(piece)
        yield piece


def read_text(
    path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES, inside: Path | None = None, what: str = "a document"
) -> str:
    """Reads a whole file as UTF-8; raises as ``read_bytes``, and ``ValueError`` where it is not UTF-8."""
    return read_bytes(path, max_bytes=max_bytes, inside=inside, what=what).decode("utf-8")


def read_raw_lines(path: str | Path, *, max_bytes: int = MAX_LINE_BYTES, inside: Path | None = None) -> Iterator[bytes]:
    """Yields the lines of a file one by one, with their ends; none of them has more than ``max_bytes``.

    Raises as ``open_foreign``.
    """
    with open_foreign(path, inside=inside) as stream:
        while line := stream.readline(max_bytes + 1):
            if len(line) > max_bytes:
                raise _too_large(path, "a line of more", max_bytes, "one line")
            yield line


def read_lines(path: str | Path, *, max_bytes: int = MAX_LINE_BYTES, inside: Path | None = None) -> Iterator[str]:
    """Yields the lines of a UTF-8 file one by one, without their ends; raises as ``read_text``."""
    for line in read_raw_lines(path, max_bytes=max_bytes, inside=inside):
        yield line.decode("utf-8").removesuffix("\n")


def read_tail(path: str | Path, num_lines: int, *, inside: Path | None = None) -> str:
    """Reads the last lines of a log, in at most ``_PIECE_BYTES``, with marks for what is not UTF-8.

    Raises as ``open_regular``.
    """
    with open_foreign(path, inside=inside) as stream:
        stream.seek(max(os.fstat(stream.fileno()).st_size - _PIECE_BYTES, 0))
        text = stream.read(_PIECE_BYTES).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-num_lines:])


def load_json(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES, inside: Path | None = None) -> Any:  # noqa: ANN401 - JSON
    """Reads a JSON document.

    Raises:
        OSError: as ``read_bytes``.
        ValueError: it is no JSON; the text goes on from the file's name.
    """
    try:
        return json.loads(read_text(path, max_bytes=max_bytes, inside=inside, what="a JSON document"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error


def describe_failure(error: OSError, path: str | Path) -> str:
    """Says why a file was not read: ``run.json cannot be read: Permission denied``, or what the door refused."""
    return str(error) if isinstance(error, ForeignFileError) else f"{path} cannot be read: {error.strerror or error}"


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Says whether a path, with all links followed, lies in a folder, which may be a link itself, or is that folder."""
    return is_below(os.path.realpath(path), os.path.realpath(folder))


def check_inside(path: Path, folder: Path) -> None:
    """Raises ``ForeignFileError`` where a path leads out of a folder by a link."""
    _resolve_inside(str(path), str(folder))


def name_descriptor(descriptor: int, path: Path) -> str:
    """Names an open file for a library that opens by name: it gets this very file, whatever ``path`` has become.

    Where the system has no such names, gives the path.
    """
    name = f"/proc/self/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)


def _open_inside(path: str, folder: str) -> int:
    target, root = _resolve_inside(path, folder)
    descriptor = os.open(target, _FLAGS | os.O_NOFOLLOW)
    # Looked up once more, since a link may have been put in between the look and the opening.
    name = f"/proc/self/fd/{descriptor}"
    if os.path.exists(name) and not is_below(os.readlink(name), root):
        os.close(descriptor)
        raise ForeignFileError(f"{path} was replaced while it was opened, and leads out of {folder}")
    return descriptor


def _resolve_inside(path: str, folder: str) -> tuple[str, str]:
    target, root = os.path.realpath(path), os.path.realpath(folder)
    if not is_below(target, root):
        raise ForeignFileError(f"{path} is a link to {target}, outside of {folder}: it is not followed")
    return target, root


def is_below(path: str, root: str) -> bool:
    """Says whether a path is a folder or lies in it; both have no links left (``os.path.realpath``)."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _too_large(path: str | Path, found: str, max_bytes: int, what: str) -> ForeignFileError:
    return ForeignFileError(f"{path} has {found}; {what} has at most {max_bytes} bytes")


def refuse_link_out(path: Path, root: Path) -> None:
    """Raises ``ConfigError`` where a path below ``root`` leads out of it by a link."""
    if not is_inside(path, root):
        raise ConfigError(
            f"{path} leads to {os.path.realpath(path)}, outside {root}: links are not followed out of a folder"
        )


def copy_folder(origin: Path, target: Path, *, root: Path) -> None:
    """Copies a folder's files to a new folder; ``root``: no link may lead out of it.

    A link inside becomes a copy of what it leads to. Raises ``ConfigError`` with the first link out, or the first
    file that is not regular, before anything is copied; ``OSError`` where reading or writing fails.
    """
    files = _list_files(origin, root, seen=frozenset())
    target.mkdir(parents=True)
    for path in files:
        copy = target / path.relative_to(origin)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(path, copy, root=root)


def copy_file(path: Path, copy: Path, *, root: Path) -> None:
    """Copies one regular file; raises ``ForeignFileError`` for another one, and where a link leads out of ``root``."""
    refuse_link_out(path, root)
    with open_foreign(path, inside=root) as source, copy.open("xb") as out:
        shutil.copyfileobj(source, out)


def _list_files(folder: Path, root: Path, *, seen: frozenset[str]) -> list[Path]:
    refuse_link_out(folder, root)
    real = os.path.realpath(folder)
    if real in seen:
        raise ConfigError(f"{folder} leads to {real}, a folder around it: links in a circle are not followed")
    files = []
    for path in sorted(folder.iterdir()):
        refuse_link_out(path, root)
        if path.is_dir():
            files += _list_files(path, root, seen=seen | {real})
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"{path} is not a regular file: it is not copied")
    return files
