"""Small JSON files of a recording, each with a digest over its content and one accepted layout.

Contract: indented, sorted ASCII JSON that ends with a newline. A file is believed only where writing its content again
gives the very same bytes, so that no bit of it can change unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.storage import Storage
from mock_scheduler.support.digests import JSON, open_sealed, seal
from mock_scheduler.support.files import encode_json

MAX_SEALED_BYTES = 16 * 2**20


def encode_sealed(document: Mapping[str, JSON], *, format_name: str, version: int) -> bytes:
    """The bytes of the file, in which ``format`` and ``version`` stand beside the document's own keys.

    Raises ``TypeError`` or ``ValueError`` where the document is no JSON.
    """
    return _encode({**document, "format": format_name, "version": version})


def load_sealed(storage: Storage, name: str, *, format_name: str, version: int) -> dict[str, Any]:
    """The document of a file of a recording, as ``decode_sealed``; raises as that and ``Storage.read_bytes`` do."""
    data = storage.read_bytes(name, max_bytes=MAX_SEALED_BYTES)
    return decode_sealed(data, source=storage.path(name), format_name=format_name, version=version)


def decode_sealed(data: bytes, *, source: str, format_name: str, version: int) -> dict[str, Any]:
    """The document, whose keys ``format`` and ``version`` are checked and left out.

    Raises ``CorruptRecordingError`` naming ``source`` where any bit changed or it is another kind of file, and
    ``RecordingError`` where another version of the format wrote it.
    """
    try:
        document = open_sealed(data.decode("ascii"))
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
    """Raise ``RecordingError`` where a file is of another version than the one that this release reads."""
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
