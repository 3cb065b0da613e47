"""The answer of a finished alignment, given again where everything that it rests on is still the same.

``answer.json`` in the alignment's folder is a sealed document (``digests.seal``) with

- ``asked``: a digest of the question: baseline and candidates as planned, the ``align`` section, and the code that
  compares and judges (every source file of the library, torch, Python);
- ``files``: number, size and times of content and state of every file of the runs, the recording and the reports, as
  the system knows them, by path;
- ``view``: the answer, as all reports show it;
- ``maker``: the ``keyed_digest`` of all that under the key of the user whose alignment it was.

Contract: an answer is given again only where question and files are the same to the last number, and each run would be
taken again by its own fingerprint. Whoever writes into a file changes its times, so changed, damaged, new and removed
files are found without reading any; a copied folder is compared anew. Nothing is removed here.
"""

from __future__ import annotations

import hmac
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler import errors
from mock_scheduler.alignment.plan.planned_run import AlignPlan
from mock_scheduler.alignment.runs.cache import FINGERPRINT_FILE, Reusable
from mock_scheduler.alignment.runs.run_cache import RunCache
from mock_scheduler.report.alignment.view import AlignmentView
from mock_scheduler.support.digests import JSON, canonical_json, compute_json_digest, open_sealed, seal
from mock_scheduler.support.documents import Document
from mock_scheduler.support.files import save_json
from mock_scheduler.support.foreign_files import read_bytes
from mock_scheduler.support.local_key import keyed_digest
from mock_scheduler.support.run_files import JOB_FOLDER
from mock_scheduler.support.sources import digest_sources
from mock_scheduler.support.versions import read_package_version

ANSWER_FILE = "answer.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Holds the file without its version."""

    asked: str
    files: dict[str, list[int]]
    view: AlignmentView
    maker: str


_DOCUMENT = Document[_Stored](_Stored)
_VIEW = Document[AlignmentView](AlignmentView)


def find_answer(
    plan: AlignPlan, cache: RunCache, *, config_name: str, reports: tuple[str, ...]
) -> AlignmentView | None:
    """Gives the stored answer to a question; ``None`` where there is none, or anything has changed.

    Args:
        plan: the question.
        cache: the finished runs of the alignment.
        config_name: the alignment's name in its reports.
        reports: names of the files in the folder that the answer was written to.

    Raises:
        ConfigError: as ``RunCache.find`` does.
    """
    folder = plan.output_dir
    try:
        document = open_sealed(read_bytes(folder / ANSWER_FILE, inside=folder, what="an answer"))
        if document.get("format_version") != FORMAT_VERSION:
            return None
        maker = str(document.get("maker"))
        if not hmac.compare_digest(_sign(document).encode(), maker.encode("utf-8", "surrogatepass")):
            return None
        stored = _DOCUMENT.load(document)
        if stored.files != _look_at(plan, reports):
            return None
    except (OSError, ValueError):
        return None
    if stored.asked != _digest_question(plan, config_name):
        return None
    is_whole = all(isinstance(cache.find(run), Reusable) for run in plan.runs)
    return stored.view if is_whole else None


def save_answer(plan: AlignPlan, view: AlignmentView, *, config_name: str, reports: tuple[str, ...]) -> None:
    """Keeps the answer to a question; last of all, since files that are written later are changed ones.

    Nothing is kept where a file changed after its run had ended: the comparisons may have read it before.

    Raises:
        OSError: it cannot be written.
    """
    if not all(_is_as_it_ended(path.parent) for path in plan.output_dir.rglob(FINGERPRINT_FILE)):
        return
    recording = plan.recording_dir
    if recording is not None and recording.is_dir() and not _is_older(recording, _ended_ns(plan.baseline.output_dir)):
        return
    document: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "asked": _digest_question(plan, config_name),
        "files": {name: list[JSON](state) for name, state in _look_at(plan, reports).items()},
        "view": _VIEW.dump(view),
    }
    document["maker"] = _sign(document)
    save_json(plan.output_dir / ANSWER_FILE, seal(document))


def _is_as_it_ended(run_dir: Path) -> bool:
    """Whether no file of a run is newer than its fingerprint, which is written when it has ended."""
    return _is_older(run_dir, _ended_ns(run_dir))


def _ended_ns(run_dir: Path) -> int:
    return (run_dir / FINGERPRINT_FILE).lstat().st_ctime_ns


def _is_older(folder: Path, ended_ns: int) -> bool:
    """Whether no file below a folder is newer than that; a job's own files, which say what became of it, apart."""
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name != JOB_FOLDER]
        if any((Path(parent) / name).lstat().st_ctime_ns > ended_ns for name in names):
            return False
    return True


def _sign(document: Mapping[str, JSON]) -> str:
    return keyed_digest(canonical_json({name: value for name, value in document.items() if name != "maker"}))


def _digest_question(plan: AlignPlan, config_name: str) -> str:
    align = plan.baseline.config.align.model_dump(mode="json")
    runs: list[JSON] = [
        {
            "name": run.name,
            "entry": run.entry,
            "overrides": list(run.overrides),
            "own_overrides": list(run.own_overrides),
            "python": run.python,
            "versions": dict(run.versions),
            "exact": run.exact,
        }
        for run in plan.runs
    ]
    library = Path(errors.__file__).parent
    return compute_json_digest(
        {
            "config_name": config_name,
            "folders": [str(plan.output_dir), str(plan.recording_dir)],
            "align": align,
            "runs": runs,
            "code": digest_sources([library]),
            "versions": {"python": platform.python_version(), "torch": read_package_version("torch")},
        }
    )


def _look_at(plan: AlignPlan, reports: tuple[str, ...]) -> dict[str, list[int]]:
    """Asks the system about every file; reads none, and follows no link."""
    folders = [plan.output_dir]
    if plan.recording_dir is not None and not plan.recording_dir.is_relative_to(plan.output_dir):
        folders.append(plan.recording_dir)
    return {str(path): _state(path) for folder in folders for path in _list_files(folder, plan.output_dir, reports)}


def _list_files(folder: Path, root: Path, reports: tuple[str, ...]) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, onerror=_raise):
        is_root = Path(parent) == root
        # In the alignment's own folder lie further files of its own: this answer, marks, and what a command adds.
        yield from (Path(parent) / name for name in sorted(names) if not is_root or name in reports)


def _raise(error: OSError) -> None:
    raise error


def _state(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
