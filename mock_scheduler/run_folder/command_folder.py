"""The folder of an alignment or of the doctor is emptied only where the same command made it.

Contract: a folder with the command's marker, or its result, in it is its own; in any other nothing is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.files import save_text
from mock_scheduler.support.run_files import ALIGN_FILE, DOCTOR_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderMarker:
    """Holds the marks of a command's own folder: a hidden file, or its result. ``text``: of the file."""

    command: str
    result_name: str
    text: str

    @property
    def name(self) -> str:
        """Returns the hidden file's name."""
        return f".{self.command.replace(' ', '-')}"

    def is_in(self, folder: Path) -> bool:
        """Says whether the command made this folder."""
        return (folder / self.name).is_file() or (folder / self.result_name).is_file()


ALIGN_MARKER = FolderMarker(
    command="mock-scheduler align",
    result_name=ALIGN_FILE,
    text="made by mock-scheduler align; --overwrite may remove what is in this folder\n",
)
DOCTOR_MARKER = FolderMarker(
    command="mock-scheduler doctor",
    result_name=DOCTOR_FILE,
    text="made by mock-scheduler doctor, which may remove what is in this folder\n",
)


_ELSEWHERE = "choose a folder where you may write (--output-dir)"


@contextmanager
def claim_folder(path: Path, *, marker: FolderMarker) -> Iterator[None]:
    """Keeps other commands out of ``path``, which is made, until the block has ended or the process is gone.

    Raises ``ConfigError`` where another one is at work there, on this machine or on another one that has the folder
    too, and where nothing can be written. A path that is no folder is left to who prepares it; where the file system
    knows no locks, nobody is kept out.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}; {_ELSEWHERE}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nothing can be written in {path}; {_ELSEWHERE}")
    with ExitStack() as stack:
        try:
            _lock(path, stack)
        except BlockingIOError:
            raise ConfigError(
                f"another {marker.command} works in {path}; wait until it has ended, or choose another folder "
                "(--output-dir)"
            ) from None
        yield


def _lock(path: Path, stack: ExitStack) -> None:
    """Holds a lock that goes with the process, however it ends; raises ``BlockingIOError`` where it is held."""
    # A lock on the folder itself needs no file in it. NFS has none of a folder, and gives one of a file beside it to
    # one machine at a time (flock(2), since Linux 2.6.12). The file stays: a new one would be another lock.
    file = path.with_name(f".{path.name}.lock")
    for place, flags in ((path, os.O_RDONLY | os.O_DIRECTORY), (file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)):
        try:
            descriptor = os.open(place, flags | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            continue  # better without protection than not at all
        return


def prepare_folder(path: Path, *, marker: FolderMarker, overwrite: bool, keep: Path | None = None) -> None:
    """Make ``path`` a folder with nothing in it but the marker and, where it lies there, ``keep``.

    Raises ``ConfigError`` where it holds anything and ``overwrite`` is not set, or where the command did not make it.
    """
    if path.exists() or path.is_symlink():
        _clear(path, marker, overwrite=overwrite, keep=keep)
    path.mkdir(parents=True, exist_ok=True)
    save_text(path / marker.name, marker.text)


def _clear(path: Path, marker: FolderMarker, *, overwrite: bool, keep: Path | None) -> None:
    if path.is_symlink() or not path.is_dir():
        raise ConfigError(f"{path} is not a folder; choose another folder (--output-dir)")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"{path} exists and is not empty; overwrite it (--overwrite) or choose another folder (--output-dir)"
        )
    if not marker.is_in(path):
        raise ConfigError(
            f"{path} was not made by {marker.command} (no {marker.name} or {marker.result_name} in it), so nothing in "
            "it is removed; choose another folder (--output-dir)"
        )
    for entry in path.iterdir():
        if keep is not None and keep.is_relative_to(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
