"""A run that ended says in ``run.json`` and ``ledger.json`` that it completed, or else in ``error.json`` why not.

Contract: reads; every file is checked, and ``AlignmentError`` names the file and lists all of its problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_scheduler.errors import AlignmentError
from mock_scheduler.support.files import load_json_object
from mock_scheduler.support.run_files import ERROR_FILE, LEDGER_FILE, RUN_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One finished run.

    Seconds are as the run measured them (``wall_s``, ``rollout_s``) and from the outside (``elapsed_s``: with the start
    of its processes). ``built`` counts the things that it built, such as engines. ``batches``: the digest of the
    rollouts that it trained on, by step.
    """

    name: str
    output_dir: Path
    layout: str
    wall_s: float
    rollout_s: float
    elapsed_s: float
    built: Mapping[str, int]
    batches: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """How a run failed: its own error in words, and its exit code; 0 where it ended well and yet ran nothing."""

    exit_code: int
    message: str


def load_summary(name: str, output_dir: Path, *, elapsed_s: float | None) -> RunSummary:
    """Reads the summary of a completed run; raises ``AlignmentError``.

    ``elapsed_s``: ``None`` where nobody watched it from outside; its own seconds stand in for that.
    """
    stated = _load(
        output_dir / RUN_FILE,
        {
            "status": _COMPLETED,
            "layout": _TEXT,
            "wall_s": _NUMBER,
            "rollout_s": _NUMBER,
            "batches": _DIGESTS,
        },
    )
    ledger = _load(output_dir / LEDGER_FILE, {"built": _COUNTS})
    return RunSummary(
        name=name,
        output_dir=output_dir,
        layout=stated["layout"],
        wall_s=float(stated["wall_s"]),
        rollout_s=float(stated["rollout_s"]),
        elapsed_s=float(stated["wall_s"]) if elapsed_s is None else elapsed_s,
        built=ledger["built"],
        batches=stated["batches"],
    )


def load_batches(output_dir: Path) -> dict[int, str]:
    """Returns the digest of the rollouts that a completed run trained on, by step; raises ``AlignmentError``."""
    stated = _load(output_dir / RUN_FILE, {"status": _COMPLETED, "batches": _DIGESTS})
    return {int(step): digest for step, digest in stated["batches"].items()}


def load_failure(output_dir: Path) -> RunFailure | None:
    """Returns the error that a failed run wrote down, or ``None`` where it wrote none; raises ``AlignmentError``."""
    path = output_dir / ERROR_FILE
    if not path.is_file():
        return None
    stated = _load(path, {"type": _TEXT, "message": _TEXT, "exit_code": _INTEGER})
    return RunFailure(exit_code=stated["exit_code"], message=f"{stated['type']}: {stated['message']}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The kind of a value: in words, and as a test."""

    text: str
    is_valid: Callable[[object], bool]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_object_of(is_valid: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, dict) and all(map(is_valid, value.values()))


def _is_digests(value: object) -> bool:
    return isinstance(value, dict) and all(
        step.isdecimal() and isinstance(digest, str) for step, digest in value.items()
    )


_TEXT = _Kind(text="a text", is_valid=lambda value: isinstance(value, str))
_INTEGER = _Kind(text="an integer", is_valid=_is_integer)
_NUMBER = _Kind(text="a number", is_valid=lambda value: _is_integer(value) or isinstance(value, float))
_COUNTS = _Kind(text="an object of integers", is_valid=lambda value: _is_object_of(_is_integer, value))
_DIGESTS = _Kind(text="an object of digests by step", is_valid=_is_digests)
_COMPLETED = _Kind(text="'completed'", is_valid=lambda value: value == "completed")


def _load(path: Path, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    """Returns the named values of a file, each checked to be of its kind."""
    try:
        content = load_json_object(path)
    except OSError as error:
        raise AlignmentError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AlignmentError(f"{path} {error}") from error
    problems = [
        f"{name} is {content[name]!r}, expected {kind.text}" if name in content else f"{name} is missing"
        for name, kind in kinds.items()
        if name not in content or not kind.is_valid(content[name])
    ]
    if problems:
        raise AlignmentError(f"{path}: {'; '.join(problems)}")
    return content
