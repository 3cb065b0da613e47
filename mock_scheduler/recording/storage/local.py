"""Stores a recording in a local folder (or in one shown by a network file system).

Contract: that of ``storage.Storage``. A file is published as ``files`` says: written aside, fsynced, linked to its
name, folder fsynced; read into memory of the reader's own. Only regular files are read, and no link that leads out of
the folder is followed. A writer holds the folder of its file open and asks where that lies (Linux), so that a folder
that is swapped for a link meanwhile takes no file out of the recording.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.storage.byte_sources import (
    COMPRESSED_ENDING,
    ByteSource,
    check_name,
    compress,
    open_compressed,
    open_file,
    open_regular,
)
from mock_scheduler.recording.storage.file_lock import FileLock, claim_folder, lock_folder
from mock_scheduler.support.files import (
    Buffer,
    make_folder,
    publish_new,
    remove_leftovers,
    rename_away,
    written_aside,
)
from mock_scheduler.support.foreign_files import is_below

_DESCRIPTORS = "/proc/self/fd"
# Other systems have no path to an open folder; a path that was looked at is used again there.
_HAS_DESCRIPTOR_PATHS = sys.platform == "linux" and os.path.isdir(_DESCRIPTORS)


class LocalStorage:
    """The folder ``root``, meant by ``location`` (the user's spelling, perhaps a ``file://`` URL)."""

    def __init__(self, location: str, *, root: str | None = None) -> None:
        self._location = location
        self._root = location if root is None else root

    @property
    def location(self) -> str:
        """Returns the location as the user spelled it."""
        return self._location

    @property
    def is_remote(self) -> bool:
        """False: the system itself reads ahead, and keeps what was read."""
        return False

    def path(self, name: str) -> str:
        """Returns the path of a file, beginning with the folder as the user spelled it."""
        return os.path.join(self._root, name) if name else self._root

    def exists(self, name: str) -> bool:
        """Whether a file or a folder of this name is there."""
        return self._find(name)[1]

    def list_names(self, folder: str) -> list[str]:
        """Names directly in a folder, sorted, without hidden ones; none where the folder is missing."""
        path = self._inside(folder)
        with _as_recording_error(path, "cannot list"):
            try:
                return sorted(name for name in os.listdir(path) if not name.startswith("."))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def open_source(self, name: str) -> ByteSource:
        """Returns a file, to be read by range; decompressed in memory where it ends in ``.zst``."""
        path = self._inside(name)
        with _as_recording_error(path, "cannot read"):
            source = open_file(path, shown_path=path)
            if name.endswith(COMPRESSED_ENDING):
                return open_compressed(source, path=path)
        return source

    def read_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """Returns a small file as a whole."""
        path = self._inside(name)
        with (
            _as_recording_error(path, "cannot read"),
            os.fdopen(open_regular(path, shown_path=path), "rb") as file,
        ):
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise CorruptRecordingError(f"{path}: over the limit of {max_bytes} bytes: not a file of a recording")
        return data

    def publish(self, name: str, pieces: Sequence[Buffer]) -> int:
        """Write a new file, compressed where its name ends in ``.zst``; returns its stored size."""
        path = self._inside(name)
        # The name alone says how a file is stored, so a reader need not look inside.
        stored = [compress(pieces)] if name.endswith(COMPRESSED_ENDING) else pieces
        size_bytes = sum(memoryview(piece).nbytes for piece in stored)
        with _as_writing_error(path, size_bytes), self._pinned(path) as pinned:
            publish_new(pinned, stored)
        return size_bytes

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in place of an older one, whole or not at all."""
        path = self._inside(name)
        with _as_writing_error(path, len(data)), self._pinned(path) as pinned, written_aside(pinned) as aside:
            aside.write_bytes(data)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, at once and as a whole; nothing happens where it is absent."""
        path = self._inside(name)
        if not os.path.lexists(path):
            return
        with _as_recording_error(path, "cannot remove"), self._pinned(path) as pinned:
            # Renamed first: a step is there as a whole or not at all, also while its folder is being emptied.
            aside = rename_away(pinned)
            # Absent: a writer that has just come here took it for what a crash had left.
            with suppress(FileNotFoundError):
                if aside.is_dir() and not aside.is_symlink():
                    shutil.rmtree(aside)
                else:
                    aside.unlink()

    def size_on_disk(self, name: str) -> int:
        """Counts bytes of a file, or of all files of a folder."""
        path = self._inside(name)
        with _as_recording_error(path, "cannot read"):
            if not os.path.isdir(path):
                return os.stat(path).st_size
            return sum(os.lstat(os.path.join(at, file)).st_size for at, _, files in os.walk(path) for file in files)

    def check_writable(self) -> None:
        """Make the folder where it is missing; raise ``RecordingError`` where no file can be made in it."""
        probe = os.path.join(self._root, f".probe.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            make_folder(Path(self._root))
            Path(probe).touch(exist_ok=False)
            Path(probe).unlink(missing_ok=True)  # another process may have taken it for what a crash had left
        except OSError as error:
            raise RecordingError(
                f"cannot record in {self._root}: {error.strerror or error}. Check its permissions, or set another "
                "rollout_mock.dump_dir."
            ) from error

    def free_bytes(self) -> int | None:
        """Returns space left for a user without privileges on the disk of the folder; the folder need not exist yet."""
        folder = Path(self._root).absolute()
        # Nothing is made here: a run that will be refused must leave no folder.
        while not folder.exists():
            folder = folder.parent
        with _as_recording_error(str(folder), "cannot ask for the free space of"):
            found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def lock(self, folder: str, *, part: str | None = None, is_patient: bool = False) -> FileLock | None:
        """Take the right to write into a folder, or only its files of one part, as ``file_lock.lock_folder`` says.

        Leftovers of crashed writers go, where this process alone may write there.
        """
        path = self._inside(folder)
        with _as_recording_error(path, "cannot lock"):
            lock = lock_folder(Path(path), part=part, is_patient=is_patient, drops_folder=bool(folder))
            if lock is not None and part is None:
                remove_leftovers(Path(path))
        return lock

    def claim(self, run_id: str) -> FileLock | None:
        """Say that this run records here, as ``file_lock.claim_folder`` says."""
        path = self._inside("")
        with _as_recording_error(path, "cannot lock"):
            # Held for a moment only, so two runs that start at once cannot both find the claim free.
            guard = lock_folder(Path(path), is_patient=True)
            try:
                return claim_folder(Path(path), run_id)
            finally:
                if guard is not None:
                    guard.release()

    @contextmanager
    def _pinned(self, path: str) -> Iterator[Path]:
        """Gives the path of a file in the folder as it is now, whatever takes the folder's name until the block ends.

        Raises ``RecordingError`` where a link has led out of the recording since the path was looked at.
        """
        if not _HAS_DESCRIPTOR_PATHS:
            yield Path(path)
            return
        parent, name = os.path.dirname(path) or ".", os.path.basename(path)
        if not os.path.isdir(parent):
            self._make(parent)
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            pinned = f"{_DESCRIPTORS}/{descriptor}"
            target = os.readlink(pinned)
            if not is_below(target, os.path.realpath(self._root)):
                raise self._leads_out(parent, target)
            yield Path(pinned, name)
        finally:
            os.close(descriptor)

    def _make(self, folder: str) -> None:
        if Path(folder) == Path(self._root or "."):
            make_folder(Path(folder))
            return
        with self._pinned(folder) as pinned:
            make_folder(pinned)

    def _leads_out(self, path: str, target: str) -> RecordingError:
        return RecordingError(f"{path} is a link to {target}, outside the recording: it is not followed")

    def _inside(self, name: str) -> str:
        """The path of a name; raises ``RecordingError`` where it leads out of the folder."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[str, bool]:
        """The path of a name and whether it is there; raises ``RecordingError`` where it leads out of the folder."""
        check_name(name, location=self._location)
        path = self.path(name)
        above = self._root
        for part in name.split("/"):
            above = os.path.join(above, part) if part else above
            try:
                mode = os.lstat(above).st_mode
            except OSError:
                return path, False
            # A name has no "..", so that only a link can lead out; without one nothing need be resolved.
            if stat.S_ISLNK(mode):
                target = os.path.realpath(path)
                if not is_below(target, os.path.realpath(self._root)):
                    raise self._leads_out(path, target)
                return path, os.path.exists(path)
        return path, True


@contextmanager
def _as_recording_error(path: str, what: str) -> Iterator[None]:
    """Turns ``OSError`` into ``RecordingError``; an absent file is plain ``FileNotFoundError``."""
    try:
        yield
    except (RecordingError, FileNotFoundError):
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, path) from error
    except OSError as error:
        raise RecordingError(
            f"{what} {path}: {error.strerror or error}. Check its permissions and its disk."
        ) from error


@contextmanager
def _as_writing_error(path: str, size_bytes: int) -> Iterator[None]:
    """Turns ``OSError`` into ``RecordingError``; a taken name stays the plain ``FileExistsError``."""
    try:
        yield
    except (RecordingError, FileExistsError):
        raise
    except OSError as error:
        raise RecordingError(
            f"cannot write {path} ({size_bytes} bytes): {error.strerror or error}. Nothing partial was left; "
            "earlier steps are intact. Check space and permissions of the folder, or set another "
            "rollout_mock.dump_dir."
        ) from error
