"""Names a debug dump's files: a folder for each kind, and in it a file for each step, rank and micro-batch.

Contract: the names are NexRL's (``nexrl/utils/data_dumper.py``). NexRL would overwrite the further optimizer
updates of a step; they have names of their own beside the documented one of the first update:
``step_000000_rank0_micro0.pt``, ``step_000000_rank0_micro0_update1.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mock_scheduler.errors import StepNotFoundError, TraceError

DumpKind = Literal[
    "trajectory",
    "old_log_probs",
    "forward_data",
    "loss",
    "is_loss_debug",
    "batch_inputs",
    "param",
    "gradient",
    "prepared_trajectories",
    "datums",
    "training_metrics",
]
DUMP_KINDS: tuple[DumpKind, ...] = get_args(DumpKind)

_NAME = re.compile(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro(\d+))?(?:_update(\d+))?\.(pt|jsonl)")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class FileKey:
    """Identifies a file. ``global_rank``, ``micro``: None where a file covers all of them. ``update``: in the step."""

    step: int
    global_rank: int | None = None
    micro: int | None = None
    update: int = 0

    @property
    def stem(self) -> str:
        """The file's name without suffix."""
        rank = "" if self.global_rank is None else f"_rank{self.global_rank}"
        micro = "" if self.micro is None else f"_micro{self.micro}"
        update = f"_update{self.update}" if self.update else ""
        return f"step_{self.step:06d}{rank}{micro}{update}"

    @property
    def place(self) -> str:
        """Rank, micro-batch and update as reports show them: ``rank0_micro1_update2``, or ``batch`` for all of them."""
        return self.stem.removeprefix(f"step_{self.step:06d}").removeprefix("_") or "batch"


def parse_key(path: Path) -> FileKey | None:
    """The key of a file by its name; None for a name that is no dump's."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    step, rank, micro, update, _ = match.groups()
    return FileKey(
        step=int(step),
        global_rank=None if rank is None else int(rank),
        micro=None if micro is None else int(micro),
        update=int(update or 0),
    )


def find_files(dump_dir: Path, kind: DumpKind) -> dict[FileKey, Path]:
    """All files of a kind by key, in order; empty where the folder is missing.

    Raises ``TraceError`` where something is there twice, as .pt and as .jsonl.
    """
    return find_files_in(dump_dir / kind)


def find_files_in(folder: Path) -> dict[FileKey, Path]:
    """Finds as ``find_files`` in a folder by its own path."""
    found: dict[FileKey, Path] = {}
    for path in sorted(folder.glob("step_*")):
        key = parse_key(path)
        if key is None:
            continue
        if key in found:
            raise TraceError(f"{path} and {found[key].name} are both of {folder.name} {key.stem}; remove one of them")
        found[key] = path
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def find_steps(dump_dir: Path) -> list[int]:
    """The steps with any file, ascending."""
    return sorted({key.step for kind in DUMP_KINDS for key in find_files(dump_dir, kind)})


def remove_steps_from(dump_dir: Path, first_step: int, kinds: Iterable[str]) -> None:
    """Remove the files of these kinds and of this step and later ones."""
    for kind in DUMP_KINDS:
        for key, path in find_files(dump_dir, kind).items() if kind in kinds else ():
            if key.step >= first_step:
                path.unlink()


def check_step(step: int, present: Iterable[int], where: str) -> None:
    """Raise ``StepNotFoundError`` with the steps present, unless ``step`` is one of them."""
    steps = sorted(present)
    if step in steps:
        return
    listed = ", ".join(map(str, steps)) or "none"
    raise StepNotFoundError(f"{where} has no step {step}; steps there: {listed}")


def _order(key: FileKey) -> tuple[int, int, int, int]:
    rank, micro = (-1 if number is None else number for number in (key.global_rank, key.micro))
    return key.step, rank, key.update, micro
