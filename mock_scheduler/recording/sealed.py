"""Reads and writes small JSON files of a recording, each with a digest over its content and one accepted layout.

Contract: indented, sorted ASCII JSON that ends with a newline. A file is believed only where writing its content again
gives the very same bytes, so no bit of it can change unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from mock_scheduler.errors import CorruptRecordingError, MockSchedulerError, RecordingError
from mock_scheduler.recording.storage import Storage
from mock_scheduler.support.digests import JSON, MAX_JSON_CONTAINERS, count_containers, open_sealed, seal
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import encode_json

T = TypeVar("T")

MAX_SEALED_BYTES = 16 * 2**20


class SealedFile(Generic[T]):
    """One kind of sealed file: ``kind`` is the data class of its content, ``noun`` names the content in messages.

    ``format`` and ``version`` stand in the file beside the content's own keys.
    """

    def __init__(self, kind: type[T], *, format_name: str, version: int, noun: str) -> None:
        self._document = Document[T](kind)
        self._format_name = format_name
        self._version = version
        self._noun = noun

    def encode(self, content: T) -> bytes:
        """Gives the bytes of the file; raises ``TypeError`` or ``ValueError`` where the content is no JSON."""
        return encode_sealed(self._document.dump(content), format_name=self._format_name, version=self._version)

    def decode(self, data: bytes, *, source: str) -> T:
        """Gives the content of the file ``source``.

        Raises:
            CorruptRecordingError: any bit changed, or it is another kind of file.
            RecordingError: another version of the format wrote it.
        """
        document = decode_sealed(data, source=source, format_name=self._format_name, version=self._version)
        try:
            return self._document.load(document)
        except ValueError as error:
            raise self.corrupt(error, source=source) from error

    def load(self, storage: Storage, name: str) -> T:
        """Reads a file of a recording; raises as ``decode`` and as ``Storage.read_bytes``."""
        return self.decode(storage.read_bytes(name, max_bytes=MAX_SEALED_BYTES), source=storage.path(name))

    def corrupt(self, error: Exception, *, source: str) -> CorruptRecordingError:
        """Makes the error for content with a right digest that makes no sense."""
        reason = str(error) if isinstance(error, ValueError | MockSchedulerError) else repr(error)
        return CorruptRecordingError(f"{source}: content is no {self._noun}: {reason}")


def encode_sealed(document: Mapping[str, JSON], *, format_name: str, version: int) -> bytes:
    """Gives the bytes of a file; raises ``TypeError`` or ``ValueError`` where the document is no JSON."""
    return _encode({**document, "format": format_name, "version": version})


def decode_sealed(data: bytes, *, source: str, format_name: str, version: int) -> dict[str, Any]:
    """Gives the document without ``format`` and ``version``, both checked; raises as ``SealedFile.decode``."""
    try:
        text = data.decode("ascii")
        if len(text) > MAX_JSON_CONTAINERS and count_containers(text) > MAX_JSON_CONTAINERS:
            raise ValueError(f"holds more than {MAX_JSON_CONTAINERS} lists and objects")
        document = open_sealed(text)
        # The digest covers the content; the layout could still have changed.
        if _encode(document) != data:
            raise ValueError("is not laid out as it was written")
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(
            f"{source}: {error}: it was changed after it was written. Restore it from a copy or record again."
        ) from error
    found_format, found_version = document.pop("format", None), document.pop("version", None)
    if found_format != format_name or type(found_version) is not int:
        raise CorruptRecordingError(f"{source}: format {found_format!r} is not {format_name!r}")
    check_version(found_version, version, source=source, kind=format_name.removeprefix("rollout-"))
    return document


def _encode(document: Mapping[str, JSON]) -> bytes:
    return encode_json(seal(document))


def check_version(found: int, supported: int, *, source: str, kind: str) -> None:
    """Raises ``RecordingError`` where a file is of another version than this release reads."""
    if found > supported:
        raise RecordingError(
            f"{source}: {kind} format version {found} is newer than {supported}, the newest that this release reads. "
            "Update mock-scheduler, or record again with this release."
        )
    if found < supported:
        raise RecordingError(
            f"{source}: {kind} format version {found} is older than {supported}, the only one this release reads: "
            "record again"
        )
