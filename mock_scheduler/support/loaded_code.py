"""Records which of a user's source files the processes of a run loaded, and how often the user's own code was called.

A run that completes leaves ``code/`` in its folder, with one JSON document for each set of files that a process loaded:

- ``files``: the SHA-256 of every loaded source that belongs to no installed package, to Python, or to a package whose
  sources are digested as a whole. A path is relative where it lies below the folder that the run
  was started in. What is loaded before the work begins is digested then (``note_loaded_code``), so that a file written
  later is known as it ran;
- ``changed_while_running``: those of them that were written since, or, if they were loaded later, after the process
  had started, so nobody knows what ran;
- ``calls``: how often each of the user's functions and classes in the place of a package's was called (``own_calls``).

Contract: standard library and our own helpers only, so that any process can import this. Files that a program reads
without importing them are not known here.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.foreign_files import open_foreign
from mock_scheduler.support.run_files import CODE_FOLDER
from mock_scheduler.support.versions import PACKAGE, installed_folders

#: The folder that a run was started in, told to a command that works in another one.
STARTED_IN_VARIABLE = "MOCK_SCHEDULER_STARTED_IN"
_STARTED_S = time.time()
#: Digests of the files that were loaded before the work of this process began.
_noted: dict[Path, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCode:
    """Holds the code of one process, or of all processes of a run; fields as in the module's docstring."""

    files: dict[str, str]
    changed_while_running: tuple[str, ...] = ()
    calls: dict[str, int]


_DOCUMENT = Document[LoadedCode](LoadedCode)


def note_loaded_code(packages: Iterable[str] = ()) -> None:
    """Digests what this process has loaded so far; a process of a run calls it before its work. Arguments as below."""
    for path in find_own_files({PACKAGE, *packages}):
        _noted.setdefault(path, _digest(path))  # the module of a second run in this process is that of the first


def save_loaded_code(
    output_dir: Path, *, global_rank: int = 0, packages: Iterable[str] = (), calls: Mapping[str, int] | None = None
) -> None:
    """Writes the record of this process; every process of a run calls it once its work is done.

    Args:
        output_dir: the run's folder.
        global_rank: names the record of a process that counted calls; equal records without any are one file.
        packages: top-level packages whose sources are digested elsewhere, beside this library's.
        calls: the counted calls, by name.

    Raises:
        OSError: the file cannot be written.
    """
    files, changed = {}, []
    for path in sorted(find_own_files({PACKAGE, *packages}) | _noted.keys()):
        name = _shown(path)
        now = _digest(path) if path.is_file() else None
        files[name] = _noted.get(path, str(now))
        if files[name] != now or (path not in _noted and path.stat().st_mtime > _STARTED_S):
            changed.append(name)
    document = _DOCUMENT.dump(LoadedCode(files=files, changed_while_running=tuple(changed), calls=dict(calls or {})))
    # A thousand ranks that loaded the same files leave one record.
    name = f"rank_{global_rank:05d}" if calls else compute_json_digest(document)[:16]
    folder = output_dir / CODE_FOLDER
    folder.mkdir(exist_ok=True)
    save_json(folder / f"{name}.json", document)


def load_loaded_code(output_dir: Path) -> LoadedCode | None:
    """Reads the records of a finished run, joined; ``None`` where it left none, ``ValueError`` for a damaged one."""
    paths = sorted((output_dir / CODE_FOLDER).glob("*.json"))
    if not paths:
        return None
    files: dict[str, str] = {}
    changed: set[str] = set()
    calls: Counter[str] = Counter()
    for path in paths:
        record = _DOCUMENT.load(load_json_object(path, inside=output_dir))
        changed |= {*record.changed_while_running, *(n for n, d in record.files.items() if files.get(n, d) != d)}
        files |= record.files
        calls.update(record.calls)
    return LoadedCode(files=files, changed_while_running=tuple(sorted(changed)), calls=dict(calls))


def find_changed_code(output_dir: Path) -> list[str]:
    """Says why a finished run may not be of the code that lies here now; empty where it is."""
    try:
        loaded = load_loaded_code(output_dir)
    except (OSError, ValueError) as error:
        return [f"the record of the files that it loaded cannot be read: {error}"]
    if loaded is None:
        return ["nobody knows which files it loaded"]
    what = dict.fromkeys(loaded.changed_while_running, "was changed while it ran")
    return [f"{name}, which it loaded, {reason}" for name, reason in {**compare_with_disk(loaded), **what}.items()]


def compare_with_disk(loaded: LoadedCode) -> dict[str, Literal["is gone", "cannot be read", "has changed"]]:
    """Says by file what became of those that do not lie here as they were loaded."""
    found: dict[str, Literal["is gone", "cannot be read", "has changed"]] = {}
    for name, digest in loaded.files.items():
        try:
            if _digest(Path(name)) != digest:
                found[name] = "has changed"
        except FileNotFoundError:
            found[name] = "is gone"
        except (OSError, ValueError):  # ValueError: no file has such a name
            found[name] = "cannot be read"
    return found


def find_own_files(packages: Collection[str] = ()) -> set[Path]:
    """Finds the sources of loaded modules that are neither Python's, nor installed, nor of these packages.

    A process follows the links in a path once, and so do the processes that are forked from it later.
    """
    installed = installed_folders()
    found = set()
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)  # of ``__main__``, which has the entry's own name here
        top = (spec.name if spec is not None and name == "__main__" else name).partition(".")[0]
        if not isinstance(origin, str) or top in packages:
            continue
        path = _real_path(origin)
        if not path.startswith(installed) and os.path.isfile(path):
            found.add(Path(path))
    return found


@cache  # thousands of modules, most of which are looked at again as the run ends
def _real_path(path: str) -> str:
    """Resolves the links in an absolute path as ``os.path.realpath`` does, and looks at each file and folder once."""
    folder, name = os.path.split(path)
    if not os.path.isabs(path) or name in ("", ".", ".."):
        return os.path.realpath(path)
    found = os.path.join(_real_path(folder), name)
    return os.path.realpath(found) if os.path.islink(found) else found


def _shown(path: Path) -> str:
    here = Path(os.environ.get(STARTED_IN_VARIABLE) or Path.cwd()).resolve()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def _digest(path: Path) -> str:
    with open_foreign(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
