"""Where a recording lies: a local folder, or an fsspec location such as ``s3://bucket/path``.

Contract: names are relative, with ``/``. What is published is whole or absent and was never there before; a crash
leaves at most a hidden temporary file, which nothing lists. Nothing is read or written outside the location.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class ByteSource(Protocol):
    """The bytes of one file, readable by range."""

    @property
    def size_bytes(self) -> int:
        """Size of the file, decompressed."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` as a *writable* view that is private to the reader (torch may wrap it).

        Locally a slice of a private memory map: no bytes are copied. Raises ``RecordingError`` on input/output errors.
        """


class Storage(Protocol):
    """One recording's location. All methods raise ``RecordingError`` naming the file for input/output errors."""

    @property
    def location(self) -> str:
        """As the user spelled it."""

    def path(self, name: str) -> str:
        """The full path or URL of a file, for messages."""

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

        Raises plain ``FileExistsError`` where the name is taken.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in place of an older one, whole or not at all."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its files; nothing happens where it is absent."""

    def size_on_disk(self, name: str) -> int:
        """Stored bytes of a file, or of all files of a folder."""

    def check_writable(self) -> None:
        """Make the location where it is missing; raise where nothing can be written there."""

    def free_bytes(self) -> int | None:
        """Space left for a user without privileges; None where it has no bound that can be asked for."""

    def lock(self, folder: str) -> Lock | None:
        """Take the exclusive right to write into a folder, or raise ``RecordingError`` naming who holds it.

        It ends with ``Lock.release`` or with the process, however it ends. None where locks do not exist (remote).
        """


class Lock(Protocol):
    """A right to write that is held."""

    def release(self) -> None:
        """Give it back; a second call does nothing."""


def open_storage(location: str) -> Storage:
    """The storage of a folder or of an fsspec URL; touches nothing. Raises ``RecordingError`` for an unknown protocol
    or a missing package (naming the extra to install)."""
    raise NotImplementedError
