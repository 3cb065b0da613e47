"""Lists a recording for a person who looks at it rather than replays it: every step, and the files beside them.

Contract: lists everything present, in order, with its problems; never stops at the first problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.paths import COMPRESSED_SUFFIX, STEP_SUFFIX, find_step, list_folders, locate_steps
from mock_scheduler.recording.reading.open_step import OpenStep
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage import Storage
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest
from mock_scheduler.support.text import printable

_STEP_STEM = re.compile(r"step_[0-9]{6,12}")
_LOOKS_LIKE_STEP = re.compile(r"step[_-]?([0-9]{1,12})(\..*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """One recorded step; ``name`` is that of its file, or of its folder of shards, in the recording."""

    folder: str
    mode: Mode
    scheduler_id: str
    step: int
    name: str

    def __str__(self) -> str:
        return f"{self.folder} step {self.step}"

    @property
    def form(self) -> str:
        """Returns ``file``, ``compressed file`` or ``shards``."""
        if self.name.endswith(COMPRESSED_SUFFIX):
            return "compressed file"
        return "file" if self.name.endswith(STEP_SUFFIX) else "shards"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderListing:
    """One folder of steps, like ``train``: its steps by number, problems of some, and files that are no step.

    ``misnamed``: files named like an absent step, and not readable as one.
    """

    folder: str
    places: Mapping[int, StepPlace]
    problems: tuple[str, ...]
    ignored: tuple[str, ...]
    misnamed: tuple[str, ...] = ()

    def chosen(self, steps: StepRanges | None) -> list[StepPlace]:
        """The steps to look at, in order; ``None`` chooses all."""
        return [place for step, place in self.places.items() if steps is None or step in steps]

    @property
    def gaps(self) -> list[int]:
        """Absent steps between the first and the last, where three or more are not all equally far apart.

        Every tenth step, or validation every other, is recorded so on purpose; of validation two steps are enough.
        """
        if not self.places:
            return []
        first, last = min(self.places), max(self.places)
        is_regular = len(self.places) > 2 or self.folder.partition(".")[0] == "val"
        distance = math.gcd(*(step - first for step in self.places)) or 1 if is_regular else 1
        return [step for step in range(first, last, distance) if step not in self.places]

    def gaps_beside(self, removed: StepRanges) -> StepRanges:
        """The gaps retention did not make."""
        return StepRanges.of(step for step in self.gaps if step not in removed)

    def raise_problems(self) -> None:
        """Raise ``RecordingError`` where a step lies there in two forms."""
        if self.problems:
            raise RecordingError("\n".join(map(printable, self.problems)))


def name_steps(steps: StepRanges) -> str:
    """Returns ``step 3``, ``steps 0-4, 7``."""
    is_one = len(steps.ranges) == 1 and steps.ranges[0][0] == steps.ranges[0][1]
    return f"step{'' if is_one else 's'} {steps}"


def list_recording(storage: Storage) -> list[FolderListing]:
    """Lists every folder holding steps or remains of them; training first."""
    listings = [_list_folder(storage, folder) for folder in list_folders(storage)]
    return [listing for listing in listings if listing.places or listing.problems or listing.ignored]


def open_place(reader: RecordingReader, place: StepPlace) -> OpenStep:
    """Open a listed step, of whatever size; raises as ``RecordingReader.open_step``."""
    # Opening does not look at the batch size, which nobody asks for here.
    request = RolloutRequest(global_step=place.step, batch_size=1, mode=place.mode, scheduler_id=place.scheduler_id)
    return reader.open_step(request)


def _list_folder(storage: Storage, folder: str) -> FolderListing:
    names = storage.list_names(folder)
    twice: dict[str, str] = {}
    try:
        located = locate_steps(storage, folder)
    except RecordingError:
        located, twice = _locate_each(storage, folder, names)
    mode: Mode = "train" if folder.split(".")[0] == "train" else "val"
    places = {
        step: StepPlace(
            folder=folder,
            mode=mode,
            scheduler_id=folder.partition(".")[2] or DEFAULT_SCHEDULER_ID,
            step=step,
            name=name,
        )
        for step, name in sorted(located.items())
    }
    known = set(located.values())
    others = [name for name in names if f"{folder}/{name}" not in known and _stem(name) not in twice]
    misnamed = [name for name in others if _is_misnamed(name, places)]
    return FolderListing(
        folder=folder,
        places=places,
        problems=tuple(twice.values()),
        ignored=tuple(
            _describe_ignored(storage.path(f"{folder}/{name}"), name) for name in others if name not in misnamed
        ),
        misnamed=tuple(_describe_misnamed(storage.path(f"{folder}/{name}"), name) for name in misnamed),
    )


def _locate_each(storage: Storage, folder: str, names: Sequence[str]) -> tuple[dict[int, str], dict[str, str]]:
    """Steps one by one: where each lies, and the error of each lying in two forms."""
    located: dict[int, str] = {}
    twice: dict[str, str] = {}
    for stem in sorted({_stem(name) for name in names if _STEP_STEM.fullmatch(_stem(name))}):
        try:
            found = find_step(storage, f"{folder}/{stem}")
        except RecordingError as error:
            twice[stem] = str(error)
            continue
        if found is not None:
            located[int(stem.removeprefix("step_"))] = found
    return located, twice


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _is_misnamed(name: str, places: Mapping[int, StepPlace]) -> bool:
    """Whether a file bears the number of an absent step; a folder without commit file is not yet one."""
    match = _LOOKS_LIKE_STEP.fullmatch(name)
    return match is not None and int(match[1]) not in places and not _STEP_STEM.fullmatch(name)


def _describe_misnamed(path: str, name: str) -> str:
    match = _LOOKS_LIKE_STEP.fullmatch(name)
    assert match is not None
    step = f"step_{int(match[1]):06d}"
    return (
        f"{path} is named like step {int(match[1])}, which is not recorded, and is not read: a step is {step}"
        f"{STEP_SUFFIX}, {step}{COMPRESSED_SUFFIX} or a folder {step}"
    )


def _describe_ignored(path: str, name: str) -> str:
    if _STEP_STEM.fullmatch(name):
        return f"{path} has no commit.json: not all of its writers finished, so it is no recorded step"
    return f"{path} is no recorded step"
