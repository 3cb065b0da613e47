"""Connects to whatever fsspec reaches by URL: buckets, and other file systems.

Contract: endpoint and credentials come from the user's environment (``AWS_ENDPOINT_URL``, fsspec's own configuration).
fsspec takes a quarter of a second to import, so importing this module costs as much.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from inspect import signature
from typing import Any

import fsspec

from mock_scheduler.errors import ConfigError

_EXTRAS = {"s3": "mock-scheduler[s3]", "s3a": "mock-scheduler[s3]", "gs": "gcsfs", "gcs": "gcsfs"}
#: Errors of the client libraries that are no OSError; a library that is not loaded cannot have raised any.
_CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
#: Protocols of fsspec that read through another file system, or out of one file or URL.
_WRAPPERS = frozenset(
    (
        *("async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache"),
        *("generic", "libarchive", "reference", "simplecache", "tar", "zip"),
    )
)
#: What stores call the version of an object, the surest first.
_VERSION_NAMES = ("ETag", "etag", "generation", "LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One object as its store describes it. ``version``: changes with its content; empty where the store says none."""

    url: str
    size_bytes: int
    version: str

    @classmethod
    def of(cls, url: str, info: Mapping[str, Any]) -> StoredObject:
        """Reads what ``info`` or ``ls`` of a file system say of an object."""
        said = next((info[name] for name in _VERSION_NAMES if info.get(name) is not None), "")
        # A time is an object of its own where one file is asked for, and a number in a listing.
        said = said.timestamp() if isinstance(said, datetime) else said
        return cls(url=url, size_bytes=int(info["size"]), version=str(said))


def connect(location: str) -> fsspec.AbstractFileSystem:
    """Makes a client for a URL, which connects to nothing yet.

    Raises:
        ConfigError: The protocol is unknown, reads through another place, or needs a package or more than a URL.
    """
    protocol = location.split("://", 1)[0].lower()
    if "::" in location:
        raise ConfigError(f"{location}: chained URLs (::) are not supported; name the place itself")
    if protocol in _WRAPPERS:
        raise ConfigError(f"{location}: {protocol}:// wraps another place; name the place itself")
    try:
        missing = _required_arguments(fsspec.get_filesystem_class(protocol))
        if missing:
            raise ConfigError(
                f"{location}: {protocol}:// needs more than a URL ({', '.join(missing)}). Use a local "
                "folder, or an object store such as s3://, gs:// or abfs://"
            )
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"{location} needs a package that is not installed ({error}): "
            f"pip install '{_EXTRAS.get(protocol, protocol)}'"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{location}: {error}. Use a local folder, or a protocol of fsspec such as s3://, gs:// or abfs://"
        ) from error


def list_folder(files: fsspec.AbstractFileSystem, url: str) -> dict[str, Mapping[str, Any]]:
    """Lists what is directly below a URL, as the store has it now: what it says of each, by its name.

    Hidden ones are left out; of a file or nothing there is nothing below. Raises the client's errors.
    """
    # Another process may have written since; fsspec would answer from its memory.
    files.invalidate_cache()
    try:
        found = files.ls(url, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    own = files._strip_protocol(url).strip("/")
    paths = {info["name"].strip("/"): info for info in found}
    named = {path.removeprefix(own).strip("/"): info for path, info in paths.items() if path != own}
    return {name: named[name] for name in sorted(named) if name and "/" not in name and not name.startswith(".")}


def client_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that a client raises where a store does not answer, or refuses."""
    loaded = [(sys.modules[module], name) for module, name in _CLIENT_ERRORS if module in sys.modules]
    return (OSError, *(getattr(module, name) for module, name in loaded))


def explain_client_error(error: Exception) -> str:
    """Says what a client raised, and what to look at; without a full stop."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{reason}. Check the bucket, the credentials and the endpoint (AWS_ENDPOINT_URL for S3)"


def client_code(error: BaseException) -> str | None:
    """Returns the code in the store's answer, for example ``PreconditionFailed``, where botocore tells it."""
    response = getattr(error.__cause__, "response", None)
    return response["Error"].get("Code") if isinstance(response, dict) and "Error" in response else None


def _required_arguments(kind: type[fsspec.AbstractFileSystem]) -> list[str]:
    """Returns the arguments that a file system cannot be opened without, such as the host of FTP."""
    named = list(signature(kind.__init__).parameters.values())[1:]
    return [item.name for item in named if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
