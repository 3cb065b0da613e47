"""Gives one process the exclusive right to write into a folder, by a lock of the operating system.

Contract: it ends with ``release`` or with the process, however that ends; a forked child does not hold it. The hidden
file locked says who holds it; it is removed on release, and one that a killed process left means nothing.

The package ``filelock`` (4.3.1) is not used: it reaches into the forks of the process that records, where not every
training has it from Megatron. Imported and not used, on Python 3.12, it let 896 of 1,200 ``os.fork`` calls of four
threads raise; while one lock call took 40 s, the fork of another thread waited 30 s and its child exited with 70. And
where a locked file was renamed away, as NFS does on removal, it gave the lock to two holders.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mock_scheduler.errors import ForeignFileError, RecordingError
from mock_scheduler.support.files import make_folder
from mock_scheduler.support.foreign_files import read_bytes

logger = logging.getLogger("mock_scheduler.rollout_mock")

LOCK_NAME = ".lock"
CLAIM_NAME = ".run"

_MAX_CLAIM_BYTES = 2**16
_IS_HELD = {errno.EWOULDBLOCK, errno.EACCES}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class FileLock:
    """A held lock, on one or more files (of a shard: the folder's, shared, and the shard's own)."""

    def __init__(self, files: Sequence[tuple[Path, int]], *, drops_folder: bool) -> None:
        self._files = tuple(files)
        # Also when nobody refers to the lock any more: a writer that was dropped must not block its successor.
        self._finalizer = weakref.finalize(self, _unlock, self._files, os.getpid(), drops_folder=drops_folder)
        self._finalizer.atexit = False  # the process's end releases it; closed files could be another's by then
        os.register_at_fork(after_in_child=_ChildCleanup(self))

    def release(self) -> None:
        """Give it back; a second call, and one in a forked child, does nothing."""
        self._finalizer()


class _ChildCleanup:
    """Closes a forked child's copies of the files; they would keep the lock when its parent has ended."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = weakref.ref(lock)

    def __call__(self) -> None:
        lock = self._lock()
        if lock is not None and lock._finalizer.detach() is not None:
            for _, descriptor in lock._files:
                os.close(descriptor)


def lock_folder(
    folder: Path, *, part: str | None = None, is_patient: bool = False, drops_folder: bool = False
) -> FileLock | None:
    """Take the right to write into ``folder``; the folder is made where it is missing.

    ``part``: only the right to write the files of this part (a shard): several hold different parts at once, and none
    while another holds the folder. ``is_patient``: wait until it is free. ``drops_folder``: on release, remove the
    folder where it is empty. None, with a warning in the log, where the file system has no locks. Raises
    ``RecordingError`` naming process and host holding it, or ``OSError``.
    """
    wanted = [(folder / LOCK_NAME, part is None)]
    if part is not None:
        wanted.append((folder / f"{LOCK_NAME}.{part}", True))
    taken: list[tuple[Path, int]] = []
    try:
        for path, is_exclusive in wanted:
            # The folder's lock first, then the shard's: in one order for all, so none waits in a ring.
            taken.append((path, _take(path, is_exclusive=is_exclusive, is_patient=is_patient)))
    except OSError as error:
        _unlock(tuple(taken), os.getpid(), drops_folder=drops_folder)
        if error.errno in _NO_LOCKS:
            logger.warning(
                "[Rollout Mock] The file system of %s has no locks (%s): make sure that only one run records there",
                folder,
                error.strerror,
            )
            return None
        if error.errno in _IS_HELD:
            raise RecordingError(_held_text(folder)) from error
        raise
    return FileLock(taken, drops_folder=drops_folder)


def claim_folder(folder: Path, run_id: str) -> FileLock | None:
    """Say that the run ``run_id`` records in ``folder``: several processes of it may at once, and no other run.

    The caller holds the folder's own lock meanwhile (``lock_folder``), so two runs cannot come at once. None where
    the file system has no locks. Raises ``RecordingError`` naming the other run, or ``OSError``.
    """
    path = folder / CLAIM_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Exclusive for a moment to write the run id, then shared with the run's other processes.
            holder = _share_claim(descriptor, run_id)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        if not _is_at(descriptor, path):  # its last holder removed it between our opening and locking it
            os.close(descriptor)
        elif holder:
            os.close(descriptor)
            raise RecordingError(_claimed_text(folder, holder, run_id))
        else:
            return FileLock([(path, descriptor)], drops_folder=False)


def _share_claim(descriptor: int, run_id: str) -> str:
    """Hold the claim together with others of the run; returns the description of another run that has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _IS_HELD:
            raise
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        claimed_by, _, holder = os.pread(descriptor, 1000, 0).decode(errors="replace").partition("\n")
        if claimed_by == run_id:
            return ""
        holder = f"this very {holder}, whose earlier writer was not closed" if holder == _own_text() else holder
        return f"run id {claimed_by}, {holder}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{run_id}\n{_own_text()}".encode(), 0)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return ""


def _claimed_text(folder: Path, holder: str, run_id: str) -> str:
    return (
        f"[Rollout Mock] {folder} is being written by another run ({holder}); this one is run id {run_id}: two runs "
        "cannot record into one folder. Schedulers or ranks of one run must be given one run_id "
        "(build_scheduler(run_id=...)); else wait for the other run to end, or set another rollout_mock.dump_dir."
    )


def _take(path: Path, *, is_exclusive: bool, is_patient: bool) -> int:
    """A descriptor holding the lock on the file that now has this name; raises ``OSError``."""
    mode = (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | (0 if is_patient else fcntl.LOCK_NB)
    while True:
        make_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # its last writer removed the folder, which was empty
            continue
        try:
            fcntl.flock(descriptor, mode)
            if _is_at(descriptor, path):
                if is_exclusive:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _own_text().encode())
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it between our opening and locking it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _unlock(files: Sequence[tuple[Path, int]], process_id: int, *, drops_folder: bool) -> None:
    if os.getpid() != process_id:
        return
    for path, descriptor in reversed(files):
        try:
            # The last one to leave removes the file; it must hold it alone for that.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                path.unlink()
                if drops_folder:
                    with suppress(OSError):  # one that is not empty stays
                        path.parent.rmdir()
        except OSError as error:
            if error.errno not in _IS_HELD:
                logger.warning("[Rollout Mock] Lock file %s was not removed: %s", path, error.strerror)
        finally:
            os.close(descriptor)


def _held_text(folder: Path) -> str:
    holders = [_describe_holder(path) for path in sorted(folder.glob(f"{LOCK_NAME}*")) if _is_locked(path)]
    held_by = ", ".join(dict.fromkeys(holders)) or "a process that has just ended"
    return (
        f"[Rollout Mock] {folder} is being written by {held_by}: two runs cannot record into one folder. "
        "Wait for the other run to end, or set another rollout_mock.dump_dir."
    )


def _is_locked(path: Path) -> bool:
    """Whether some process holds the file exclusively (the folder's own is only shared while shards are written)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _describe_holder(path: Path) -> str:
    try:
        text = read_bytes(path, max_bytes=_MAX_CLAIM_BYTES)[:200].decode(errors="replace").strip()
    except (FileNotFoundError, ForeignFileError):
        text = ""
    if text == _own_text():
        return f"this very {text}, whose earlier writer was not closed"
    return text or "another process"


def _own_text() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
