"""What every reader of foreign rollouts shares: the steps it gives, the options it is given, and looking for files.

Contract: a reader invents nothing. What its files do not say and a recording needs is filled in by one rule, and named
in ``ForeignStep.lacks``; the recording says it (``meta["not_in_source"]``, and its provenance).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.errors import RecordingError
from mock_scheduler.scheduler import Mode
from mock_scheduler.support.foreign_files import is_inside
from mock_scheduler.support.text import list_some

#: The entry of a batch's meta that lists what its source did not say.
LACKS_META = "not_in_source"

_NUM_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What the user states of rollouts whose files do not say it.

    Attributes:
        sampling: how tokens were sampled; fields that are not in ``stated`` are assumptions.
        stated: the fields of ``sampling`` that the user gave.
        group_size: trajectories of every group, where files have no groups; ``None``: each row is one.
        reward_key: the entry of a dict of rewards that counts.
    """

    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    )
    stated: frozenset[str] = frozenset()
    group_size: int | None = None
    reward_key: str | None = None

    @property
    def assumed(self) -> tuple[str, ...]:
        """The fields of ``sampling`` that nobody stated."""
        names = ("temperature", "top_p", "top_k", "logprobs_mode")
        return tuple(f"sampling.{name}" for name in names if name not in self.stated)


def state_sampling(
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    logprobs_mode: Literal["processed", "raw"] | None,
) -> tuple[SamplingParams, frozenset[str]]:
    """Gives the sampling of what the user stated, plain sampling elsewhere, and the names stated."""
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "logprobs_mode": logprobs_mode}
    sampling = SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else top_k,
        logprobs_mode="processed" if logprobs_mode is None else logprobs_mode,
    )
    return sampling, frozenset(name for name, value in given.items() if value is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignStep:
    """One step out of foreign files. ``lacks``: core fields that these do not say, and were filled in."""

    step: int
    batch: RolloutBatch
    mode: Mode = "train"
    policy_version: int = 0
    lacks: tuple[str, ...] = ()

    def noted(self) -> ForeignStep:
        """The step whose batch says what its source lacks."""
        batch = replace(self.batch, meta={**self.batch.meta, LACKS_META: list(self.lacks)})
        return replace(self, batch=batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A file of one step; ``parts``: the groups of its name's pattern."""

    path: Path
    parts: tuple[str, ...]


def find_files(source: Path, pattern: str, example: str) -> list[FoundFile]:
    """Lists the files of a folder whose relative paths fit a pattern, in order; a file that the user named is one.

    Args:
        source: a file, or a folder.
        pattern: of the whole relative path; of a file its last parts must fit.
        example: of such a path, for messages.

    Raises:
        RecordingError: there is none; the message lists what is there.
    """
    if source.is_file():
        text = str(source.absolute())
        match = re.search(rf"(?:^|/){pattern}$", text)
        if match is None:
            raise RecordingError(f"{source} is called otherwise than {example}: its step is not known; rename it so")
        return [FoundFile(path=source, parts=match.groups(default=""))]
    if not source.is_dir():
        raise RecordingError(f"{source} is not there: give a file such as {example}, or its folder")
    found, others = [], []
    for path in _walk(source, depth=3):
        match = re.fullmatch(pattern, path.relative_to(source).as_posix())
        if match is None:
            others.append(path.relative_to(source).as_posix())
        else:
            found.append(FoundFile(path=path, parts=match.groups(default="")))
    if not found:
        there = list_some(others, _NUM_SHOWN, ", ") if others else "nothing"
        raise RecordingError(f"{source} holds no file such as {example}; it holds {there}")
    return sorted(found, key=lambda file: (_natural(file.parts), str(file.path)))


def _walk(folder: Path, *, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            # A link to a folder around it would be walked for ever.
            if depth and not path.is_symlink() and is_inside(path, folder):
                yield from _walk(path, depth=depth - 1)
        else:
            yield path


def _natural(parts: Sequence[str]) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isascii() and part.isdecimal() else (-1, part) for part in parts)
