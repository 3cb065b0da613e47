"""Folders of a bucket as local ones: small files whole, large ones as their headers until their tensors are read.

Contract: whoever reads a file knows nothing of the bucket, but for ``complete``, which asks for the tensors of one
before they are read. A file that was not completed has its header and its size, and zeros for tensors. Messages have
the paths of local files; ``name_locations`` puts their URLs in. Files of at most two folders are complete at a time,
so a trace takes the disk of two steps.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mock_scheduler.errors import TraceError, redact

if TYPE_CHECKING:
    import fsspec

    from mock_scheduler.support.node_cache import NodeCache
    from mock_scheduler.support.object_stores import StoredObject

#: Requests that wait for a store at once.
_NUM_THREADS = 16
#: Asked for of a file whose header is wanted; most are shorter.
_HEADER_BYTES = 2**16
#: safetensors itself refuses longer ones.
_MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
_NUM_COMPLETE = 2
_NUM_NAMED = 3
_MOMENT_S = 60.0

#: The folders that are there, by their local paths.
_OPEN: dict[str, FetchedFolder] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedFile:
    """One file of a folder. ``group``: of files in one folder that are read together, and so are completed together."""

    name: str
    stored: StoredObject
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Holds what lies directly in a folder."""

    files: tuple[FetchedFile, ...]
    folders: tuple[str, ...]


class FetchedFolder:
    """Shows a URL as a folder; a context manager, which removes it.

    Args:
        location: The URL.
        files: Its client.
        cache: Keeps whole files on this node.
        parent: Folder of the cache's disk to make the folder in.
    """

    def __init__(self, location: str, files: fsspec.AbstractFileSystem, cache: NodeCache, *, parent: Path) -> None:
        self.location = location.rstrip("/")
        self._files = files
        self._cache = cache
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left(parent)
        self._parent = Path(tempfile.mkdtemp(dir=parent)).resolve()
        # Held while this process lives: the folder of a killed one is told by it.
        self._held = os.open(self._parent, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        #: Named as the URL ends: a run is called by its folder, and its noise may lie in those around it.
        self.root = self._parent.joinpath(*_split(self.location)[-_NUM_NAMED:])
        self._lock = threading.Lock()
        self._partial: dict[str, FetchedFile] = {}
        self._begun: dict[str, Future[None]] = {}
        self._complete_folders: list[str] = []
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetching")
        _OPEN[str(self.root)] = self

    def __enter__(self) -> FetchedFolder:
        return self

    def __exit__(self, *_error: object) -> None:
        del _OPEN[str(self.root)]
        self._executor.shutdown(cancel_futures=True)
        shutil.rmtree(self._parent, ignore_errors=True)
        os.close(self._held)

    def look_into(self, name: str) -> Listing:
        """Lists what lies directly in a folder; names of files are those in the whole, those of folders their own.

        Raises ``TraceError`` where the store does not answer.
        """
        from mock_scheduler.support.object_stores import StoredObject, list_folder

        url = f"{self.location}/{name}" if name else self.location
        with _translated(url):
            found = list_folder(self._files, url)
        files = [
            FetchedFile(name=f"{name}/{base}".strip("/"), stored=StoredObject.of(f"{url}/{base}", info))
            for base, info in found.items()
            if info["type"] == "file"
        ]
        folders = [base for base, info in found.items() if info["type"] == "directory"]
        return Listing(files=tuple(files), folders=tuple(folders))

    def look_into_all(self, names: Sequence[str]) -> Iterator[Listing]:
        """Lists several folders at once; raises as ``look_into``."""
        return self._executor.map(self.look_into, names)

    def find_file(self) -> FetchedFile | None:
        """Finds the file at the location itself; ``None`` where there is none. Raises as ``look_into``."""
        return self._find(self.location, "")

    def find_around(self, name: str) -> list[FetchedFile]:
        """Finds files of a name in the two folders around the location; raises as ``look_into``."""
        found, url = [], self.location
        for level in range(1, min(len(_split(self.location)), _NUM_NAMED)):
            url = url.rpartition("/")[0]
            found.append(self._find(f"{url}/{name}", f"{'../' * level}{name}"))
        return [file for file in found if file is not None]

    def _find(self, url: str, name: str) -> FetchedFile | None:
        from mock_scheduler.support.object_stores import StoredObject

        with _translated(url):
            try:
                info = self._files.info(url)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return FetchedFile(name=name, stored=StoredObject.of(url, info)) if info["type"] == "file" else None

    def find_below(self, *, depth: int) -> list[str]:
        """Finds the names of all files at most so deep; raises as ``look_into``."""
        with _translated(self.location):
            found = self._files.find(self.location, maxdepth=depth)
        own = self._files._strip_protocol(self.location).strip("/")
        return [path.strip("/").removeprefix(own).strip("/") for path in found]

    def show_names(self, names: Iterable[str]) -> None:
        """Shows empty files, where a name alone tells something."""
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def fetch(self, whole: Sequence[FetchedFile], headers: Sequence[FetchedFile] = ()) -> None:
        """Fetches files as a whole, and the headers of others; raises ``TraceError`` where the store does not give one.

        Folders are made where they are missing.
        """
        for file in (*whole, *headers):
            (self.root / file.name).parent.mkdir(parents=True, exist_ok=True)
        begun = [self._executor.submit(self._fetch_whole, file) for file in whole]
        begun_headers = [self._executor.submit(self._fetch_header, file) for file in headers]
        for one in begun:
            one.result()
        for file, header in zip(headers, begun_headers, strict=True):
            if header.result() < file.stored.size_bytes:
                self._partial[file.name] = file

    def complete(self, path: Path) -> None:
        """Fetches the tensors of a file, and of its group beside it; raises ``TraceError`` as ``fetch``."""
        name = path.relative_to(self.root).as_posix()
        with self._lock:
            wanted = self._partial.get(name)
            if wanted is None:
                return
            self._keep_few(name.rpartition("/")[0])
            for file in self._partial.values():
                if file.group == wanted.group and file.name not in self._begun:
                    self._begun[file.name] = self._executor.submit(self._fetch_whole, file)
            begun = self._begun[name]
        begun.result()

    def _keep_few(self, folder: str) -> None:
        """Takes tensors out of the folders that were completed first."""
        if folder in self._complete_folders:
            return
        self._complete_folders.append(folder)
        while len(self._complete_folders) > _NUM_COMPLETE:
            oldest = self._complete_folders.pop(0)
            for name in [name for name in self._begun if name.rpartition("/")[0] == oldest]:
                begun = self._begun.pop(name)
                # Whoever has mapped it keeps it.
                if not begun.cancel() and begun.exception() is None:
                    os.replace(_header_path(self.root / name), self.root / name)

    def _fetch_whole(self, file: FetchedFile) -> None:
        path = self.root / file.name

        def take(kept: Path) -> None:
            aside = path.with_name(f".{path.name}.tmp")
            _link_or_copy(kept, aside)
            if path.exists() and not _header_path(path).exists():
                _link_or_copy(path, _header_path(path))
            os.replace(aside, path)

        with _translated(file.stored.url):
            self._cache.use(file.stored, lambda target: self._files.get_file(file.stored.url, str(target)), take)

    def _fetch_header(self, file: FetchedFile) -> int:
        """Returns how many bytes were fetched."""
        size_bytes = file.stored.size_bytes
        with _translated(file.stored.url):
            data = self._read(file.stored, 0, min(_HEADER_BYTES, size_bytes)) if size_bytes else b""
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            # A length that is none is left to who reads the header.
            if len(data) < end <= min(size_bytes, _MAX_HEADER_BYTES):
                data += self._read(file.stored, len(data), end)
            with (self.root / file.name).open("xb") as stream:
                stream.write(data)
                stream.truncate(size_bytes)
        return len(data)

    def _read(self, stored: StoredObject, start: int, stop: int) -> bytes:
        def fetch(start: int, stop: int) -> bytes:
            return bytes(self._files.cat_file(stored.url, start=start, end=stop))

        return bytes(self._cache.read(stored, start, stop, fetch))


def complete(path: Path) -> None:
    """Fetches the tensors of a file where it is of a bucket; raises ``TraceError`` where the store does not give it."""
    for root, folder in _OPEN.items():
        if str(path).startswith(root + os.sep):
            folder.complete(path)


def find_location(path: Path) -> str:
    """Returns the URL that a path stands for, or the path itself: a process on another machine opens the same by it."""
    for root, folder in _OPEN.items():
        if str(path) == root or str(path).startswith(root + os.sep):
            return folder.location + str(path).removeprefix(root)
    return str(path)


def name_locations(text: str) -> str:
    """Puts the URLs of fetched folders, without passwords, into a message in the place of their local paths."""
    for root, folder in _OPEN.items():
        text = text.replace(root, redact(folder.location))
    return text


def _remove_left(parent: Path) -> None:
    """Removes the folders of processes that were killed; one that was made a moment ago may not be held yet."""
    for folder in parent.iterdir():
        with suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.stat().st_mtime < time.time() - _MOMENT_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _split(location: str) -> list[str]:
    """Splits a URL at its slashes, without its protocol."""
    return [part for part in location.partition("://")[2].split("/") if part]


def _header_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.header")


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # where the file system knows no hard links
        shutil.copyfile(path, target)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turns a client's errors into ``TraceError``."""
    from mock_scheduler.support.object_stores import client_errors, explain_client_error

    try:
        yield
    except client_errors() as error:
        raise TraceError(f"cannot read {url}: {explain_client_error(error)}, and the disk of this node") from error
