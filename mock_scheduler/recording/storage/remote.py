"""A recording in an object store (or another file system) that fsspec reaches by URL.

Contract: that of ``storage.Storage``. A file is one object, written by one request the store refuses where the
name is taken (S3: ``If-None-Match``), so it is whole or absent and several writers do not mix. Only stores that can do
this are written to; any that fsspec knows can be read. Endpoint and credentials come from the user's environment
(``AWS_ENDPOINT_URL``, fsspec's own configuration).
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import fsspec

from mock_scheduler.errors import ConfigError, CorruptRecordingError, ForeignFileError, RecordingError, redact
from mock_scheduler.recording.storage.byte_sources import (
    COMPRESSED_ENDING,
    MAX_DECOMPRESSED_BYTES,
    ByteSource,
    MemorySource,
    check_name,
    compress,
    open_compressed,
)
from mock_scheduler.recording.storage.object_source import FIRST_BYTES, KeptRanges, ObjectSource
from mock_scheduler.support.files import Buffer
from mock_scheduler.support.node_cache import open_cache
from mock_scheduler.support.object_stores import (
    StoredObject,
    client_code,
    client_errors,
    connect,
    explain_client_error,
    list_folder,
)
from mock_scheduler.support.threads import PerProcess

#: Protocols whose stores make an object whole and only where its name is free. ``check_writable`` tries it out.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")

#: A listing is believed for so long, of which no more objects than this are noted.
_FRESH_S, _MAX_NOTED = 60.0, 1000
_NUM_ATTEMPTS = 5  # of a write that the store refuses because another one to the same name is going on


class FsspecStorage:
    """The location of an fsspec URL; opening it connects to nothing. Raises ``RecordingError`` as ``open_storage``."""

    def __init__(self, location: str, *, is_kept: bool = False) -> None:
        self._location = location.rstrip("/")
        self._protocol = location.split("://", 1)[0].lower()
        # A client's threads do not exist in a forked child, which connects anew.
        self._connected = PerProcess(self._connect(), remake=self._connect)
        self._kept = self._open_cache() if is_kept else None
        #: What a listing said of objects, each for the next who opens it, and when that was, in seconds.
        self._listed: dict[str, tuple[StoredObject, float]] = {}

    @property
    def location(self) -> str:
        """Returns the location as the user spelled it, without a password in it."""
        return redact(self._location)

    @property
    def is_remote(self) -> bool:
        """True."""
        return True

    def path(self, name: str) -> str:
        """Returns the URL of a file, without a password in it: for messages."""
        return f"{self.location}/{name}" if name else self.location

    def exists(self, name: str) -> bool:
        """Whether an object, or any below this name, is there."""
        with self._translated(name, "cannot read"):
            return bool(self._files.exists(self._url(name)))

    def list_names(self, folder: str) -> list[str]:
        """Names directly below a folder, sorted, without hidden ones, as the store has them now."""
        url = self._url(folder)
        with self._translated(folder, "cannot list"):
            found = list_folder(self._files, url)
        if self._kept is not None and len(found) <= _MAX_NOTED:
            for name, info in found.items():
                if info["type"] == "file":
                    self._listed[f"{folder}/{name}"] = StoredObject.of(f"{url}/{name}", info), time.monotonic()
        return list(found)

    def open_source(self, name: str) -> ByteSource:
        """Returns an object, read by range; decompressed in memory where it ends in ``.zst``."""
        url = self._url(name)
        with self._translated(name, "cannot read"):
            source = self._open_object(name, url) if self._kept is None else self._open_kept(name, url, self._kept)
            if not name.endswith(COMPRESSED_ENDING):
                return source
            if source.size_bytes > MAX_DECOMPRESSED_BYTES:
                raise CorruptRecordingError(f"{url}: {source.size_bytes} bytes are over the limit of a compressed file")
            # In one request, since each costs a round trip.
            whole = MemorySource(source.read(0, source.size_bytes), path=url)
            return open_compressed(whole, path=url)

    def _open_object(self, name: str, url: str) -> ByteSource:
        try:
            first = memoryview(bytearray(self._files.cat_file(url, start=0, end=FIRST_BYTES)))
        except FileNotFoundError:
            raise
        except client_errors():  # an empty object has no first byte, and some stores say so
            first = memoryview(bytearray())
        if 0 < len(first) < FIRST_BYTES:
            return MemorySource(first, path=url)
        size_bytes = self._stored(url).size_bytes
        return ObjectSource(partial(self._fetch, name), size_bytes=size_bytes, first=first, path=self.path(name))

    def _open_kept(self, name: str, url: str, kept: KeptRanges) -> ByteSource:
        # Its version, by which this node's processes know what they keep, costs each of them one short answer.
        listed, listed_s = self._listed.pop(name, (None, -math.inf))
        stored = listed if listed and time.monotonic() - listed_s < _FRESH_S else self._stored(url)
        fetch = kept.reader(stored, partial(self._fetch, name), path=self.path(name))
        is_read_whole = name.endswith(COMPRESSED_ENDING)
        first = fetch(0, min(stored.size_bytes, FIRST_BYTES)) if not is_read_whole else memoryview(b"")
        return ObjectSource(fetch, size_bytes=stored.size_bytes, first=first, path=self.path(name))

    def _fetch(self, name: str, start: int, stop: int) -> memoryview:
        """Requests a range of an object, writable."""
        url = self._url(name)
        with self._translated(name, "cannot read"):
            return memoryview(bytearray(self._files.cat_file(url, start=start, end=stop) if stop > start else b""))

    def read_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """Returns a small object as a whole."""
        url = self._url(name)
        with self._translated(name, "cannot read"):
            if self._stored(url).size_bytes > max_bytes:
                raise CorruptRecordingError(f"{url}: over the limit of {max_bytes} bytes: not a file of a recording")
            return bytes(self._files.cat_file(url))

    def publish(self, name: str, pieces: Sequence[Buffer]) -> int:
        """Write a new object, compressed where its name ends in ``.zst``; returns its stored size."""
        url = self._url(name)
        data = compress(pieces) if name.endswith(COMPRESSED_ENDING) else b"".join(pieces)
        with self._translated(name, "cannot write", size_bytes=len(data)):
            try:
                # Asked first, so that a large object is not sent in vain; the store's own refusal is what decides.
                if self._files.exists(url):
                    raise FileExistsError(url)
                self._create(url, data)
            except FileExistsError:
                # A request may have been repeated after its answer was lost: our own bytes are no conflict.
                if not self._holds(url, data):
                    raise
        return len(data)

    def replace(self, name: str, data: bytes) -> None:
        """Write an object in place of an older one."""
        with self._translated(name, "cannot write", size_bytes=len(data)):
            self._files.pipe_file(self._url(name), data)

    def remove(self, name: str) -> None:
        """Remove an object, or all below a folder in the order of their names; nothing happens where it is absent."""
        url = self._url(name)
        with self._translated(name, "cannot remove"):
            for path in self._objects(url):
                self._files.rm_file(path)
            self._files.invalidate_cache()

    def size_on_disk(self, name: str) -> int:
        """Counts bytes of an object, or of all below a folder."""
        url = self._url(name)
        with self._translated(name, "cannot read"):
            sizes = self._objects(url)
        if not sizes:
            raise FileNotFoundError(f"{url} is absent")
        return sum(sizes.values())

    def check_writable(self) -> None:
        """Write a small object, try to write it again, and remove it; raises where the store lets any of it go wrong.

        Most of all where it writes over an object that must only be created: two runs would overwrite each other.
        """
        if self._protocol not in OBJECT_STORES:
            raise RecordingError(
                f"cannot record in {self._location}: {self._protocol}:// does not make files whole and only where the "
                f"name is free. Record into a local folder or one of {', '.join(f'{p}://' for p in OBJECT_STORES)}, "
                "and copy it."
            )
        name = f".probe.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        url = self._url(name)
        with self._translated("", "cannot record in"):
            self._create(url, b"first")
            try:
                self._create(url, b"second")
            except FileExistsError:
                return
            finally:
                self._files.rm_file(url)
        raise RecordingError(
            f"cannot record in {self._location}: the store overwrites an object that was only to be created "
            "(S3: it ignores If-None-Match), so two runs could overwrite each other's steps. Use a store or a release "
            "that supports it, or record into a local folder and copy it."
        )

    def free_bytes(self) -> int | None:
        """None: an object store has no such bound."""
        return None

    def lock(self, folder: str, *, part: str | None = None, is_patient: bool = False) -> None:
        """None: object stores have no locks; they refuse to create an existing object, and so keep writers apart."""
        del folder, part, is_patient

    def claim(self, run_id: str) -> None:
        """None, as there are no locks."""
        del run_id

    @property
    def _files(self) -> fsspec.AbstractFileSystem:
        """This process's own client."""
        return self._connected.get()

    def _connect(self) -> fsspec.AbstractFileSystem:
        try:
            return connect(self._location)
        except ConfigError as error:
            raise RecordingError(str(error)) from error

    def _open_cache(self) -> KeptRanges | None:
        try:
            cache = open_cache()
        except (ConfigError, ForeignFileError) as error:
            raise RecordingError(f"{self.location} is read by way of a folder on this node: {error}") from error
        return None if cache is None else KeptRanges(cache)

    def _url(self, name: str) -> str:
        check_name(name, location=self.location)
        return f"{self._location}/{name}" if name else self._location

    def _stored(self, url: str) -> StoredObject:
        info = self._files.info(url)
        if info["type"] != "file":
            raise FileNotFoundError(f"{url} is a folder")
        return StoredObject.of(url, info)

    def _objects(self, url: str) -> dict[str, int]:
        """Returns the object of this name, or those below it, in the order of their names, with their sizes."""
        self._files.invalidate_cache()
        found = self._files.find(url, detail=True)
        return {path: int(info["size"]) for path, info in sorted(found.items())}

    def _create(self, url: str, data: bytes) -> None:
        """Write an object; raises ``FileExistsError`` where there is one."""
        for attempt in range(_NUM_ATTEMPTS):
            try:
                self._files.pipe_file(url, data, mode="create")
            except OSError as error:
                code = client_code(error)
                # The store's answer to If-None-Match where the name is taken.
                if code in ("PreconditionFailed", "412"):
                    raise FileExistsError(url) from error
                # S3 asks to try again where another write to the name is going on.
                if code != "ConditionalRequestConflict" or attempt + 1 == _NUM_ATTEMPTS:
                    raise
            else:
                return

    def _holds(self, url: str, data: bytes) -> bool:
        try:
            return self._stored(url).size_bytes == len(data) and self._files.cat_file(url) == data
        except FileNotFoundError:  # another writer's, which has been removed meanwhile
            return False

    @contextmanager
    def _translated(self, name: str, what: str, *, size_bytes: int | None = None) -> Iterator[None]:
        """Turns a client's errors into ``RecordingError``; an absent or taken name keeps its plain error."""
        try:
            yield
        except RecordingError:
            raise
        except (FileNotFoundError, FileExistsError) as error:
            if client_code(error) != "NoSuchBucket":
                raise
            raise self._error(error, name, what, size_bytes) from error
        except client_errors() as error:
            raise self._error(error, name, what, size_bytes) from error

    def _error(self, error: Exception, name: str, what: str, size_bytes: int | None) -> RecordingError:
        size = "" if size_bytes is None else f" ({size_bytes} bytes)"
        return RecordingError(
            f"{what} {self.path(name)}{size}: {explain_client_error(error)}, or set another rollout_mock.dump_dir."
        )
