"""Opens the location of a recording: a local folder, or an fsspec location like ``s3://bucket/path``.

Contract: names are relative, with ``/``. A published file is whole or absent and was never there before; a crash
leaves at most a hidden temporary file that nothing lists. Nothing is read or written outside the location.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.storage.byte_sources import ByteSource as ByteSource
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.support.files import Buffer as Buffer
from mock_scheduler.support.locations import find_path, normalize_location


class Storage(Protocol):
    """One recording's location. All methods raise ``RecordingError`` naming the file for input/output errors."""

    @property
    def location(self) -> str:
        """Returns the location as the user spelled it."""

    @property
    def is_remote(self) -> bool:
        """Whether each question to it costs a round trip, so that several are asked at once and ahead of time."""

    def path(self, name: str) -> str:
        """Returns the full path or URL of a file, for messages."""

    def exists(self, name: str) -> bool:
        """Whether a file or a folder of this name is there."""

    def list_names(self, folder: str) -> list[str]:
        """Names directly in a folder (``""``: the location itself), sorted, temporary and hidden ones left out."""

    def open_source(self, name: str) -> ByteSource:
        """A file for reading, decompressed where its name ends in ``.zst``; ``FileNotFoundError`` where absent."""

    def read_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """A small file as a whole; ``CorruptRecordingError`` where larger, ``FileNotFoundError`` where absent."""

    def publish(self, name: str, pieces: Sequence[Buffer]) -> int:
        """Write a new file (compressed where its name ends in ``.zst``) from pieces in order; returns its stored size.

        Raises plain ``FileExistsError`` where the name is taken. A remote file holding these very bytes counts as
        written: its store may have got a request whose answer was lost, and that was therefore repeated.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in place of an older one, whole or not at all."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its files; nothing happens where it is absent.

        A local folder goes as a whole; a remote one file by file in the order of their names.
        """

    def size_on_disk(self, name: str) -> int:
        """Returns stored bytes of a file, or of all files of a folder."""

    def check_writable(self) -> None:
        """Make the location where it is missing; raise where nothing can be written there."""

    def free_bytes(self) -> int | None:
        """Space left for a user without privileges; None where it has no bound that can be asked for."""

    def lock(self, folder: str, *, part: str | None = None, is_patient: bool = False) -> Lock | None:
        """Take the exclusive right to write into a folder, or raise ``RecordingError`` naming who holds it.

        ``part``: only that to write the files of one part (a shard). ``is_patient``: wait for it instead. It ends with
        ``Lock.release`` or with the process, however it ends. None where locks do not exist (remote).
        """

    def claim(self, run_id: str) -> Lock | None:
        """Say that this run records here: its processes may at once, and no other run's; raises ``RecordingError``
        naming the other one. It ends as a lock does. None where locks do not exist (remote).
        """


class Lock(Protocol):
    """A held right to write."""

    def release(self) -> None:
        """Give it back; a second call does nothing."""


@contextmanager
def locked(storage: Storage) -> Iterator[None]:
    """Hold, while the block runs, the right to write the files directly in the location; waits for it."""
    lock = storage.lock("", is_patient=True)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def open_storage(location: str, *, is_kept: bool = False) -> Storage:
    """The storage of a folder (``~`` is expanded), a ``file://`` URL or an fsspec URL; touches nothing of it.

    ``is_kept``: what is read of a remote one is kept on this node (``support.node_cache``), for its other processes and
    the next run. Raises ``RecordingError`` for an unknown protocol or a missing package (naming the extra to install),
    and where nothing can be kept.
    """
    try:
        location = normalize_location(location)
        path = find_path(location)
    except ValueError as error:
        raise RecordingError(str(error)) from error
    if path is not None:
        return LocalStorage(location, root=path)
    # fsspec takes a quarter of a second to import, and a local recording does not need it.
    from mock_scheduler.recording.storage.remote import FsspecStorage

    return FsspecStorage(location, is_kept=is_kept)
