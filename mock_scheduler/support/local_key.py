"""A key of this user: digests that nobody can guess from, and proof that this user wrote a file where it lies.

A plain SHA-256 of a short secret is found by trying. So the digest is an HMAC under 32 random bytes of this user on
this machine: ``$XDG_STATE_HOME/mock-scheduler/key`` (else below ``~/.local/state``), of mode 0600. The key goes nowhere
else. The mark of an own file, a hidden file beside it, is such a digest of its place and its content: whoever sends,
moves or changes the file cannot make it.

Contract: equal values have equal digests as long as the key file is there. Where it cannot be
made or is not this user's alone, the key lives as long as the process: a digest then equals no stored one.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from mock_scheduler.support.files import save_text
from mock_scheduler.support.foreign_files import open_foreign, read_bytes

_NUM_BYTES = 32


def keyed_digest(value: str) -> str:
    """Returns the HMAC-SHA-256 (hex) of a text under this user's key."""
    return hmac.new(_key(find_key_file()), value.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def mark_own(path: Path) -> None:
    """Marks a file, just written, as this user's own; where this cannot be done the file passes for a foreign one."""
    with suppress(OSError):
        save_text(_mark_of(path), _describe(path))


def is_own(path: Path) -> bool:
    """Says whether this user wrote the file, in this place and with this content."""
    try:
        stated = read_bytes(_mark_of(path), max_bytes=2 * hashlib.sha256().digest_size)
        return hmac.compare_digest(stated, _describe(path).encode("ascii"))
    except OSError:
        return False


def _mark_of(path: Path) -> Path:
    return path.with_name(f".own.{path.name}")


def _describe(path: Path) -> str:
    with open_foreign(path) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return keyed_digest(f"{content} {os.path.realpath(path)}")


def find_key_file() -> Path:
    """Returns the place of the key, which need not exist."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "mock-scheduler" / "key"


@functools.lru_cache(maxsize=8)
def _key(path: Path) -> bytes:
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of two processes that begin at once one makes it, whole before it has its name; both read that one.
        if not path.exists():
            _make(path)
        return _read(path)
    return secrets.token_bytes(_NUM_BYTES)


def _make(path: Path) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """Reads the key; raises ``OSError`` where the file is a link, another user's, open to others or of another size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        key = file.read(_NUM_BYTES + 1)
    if not is_own or len(key) != _NUM_BYTES:
        raise PermissionError(f"{path} is no key of this user alone")
    return key
