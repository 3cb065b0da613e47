"""The trajectories that AReaL's ``trajectory_debug`` (pull request 1407) writes: a list of dicts of padded tensors.

Contract: ``step_{N}.pt``, or a file for each data-parallel rank, joined in the order of the ranks. Tensors come back by
``PaddedCodec``. What releases of AReaL write (``dump_to_file``) is text without tokens, and cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.areal.codec import join
from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.padded import AREAL, PaddedCodec
from mock_scheduler.errors import BatchError, ForeignFileError, RecordingError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.pickles.torch_files import read_torch_file

_PATTERN = r"(?:[^/]*/)*step_(\d+)(?:_dp_(\d+))?\.pt"


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in their order.

    Raises:
        RecordingError: there is none, or they are the text that releases of AReaL write.
    """
    if source.suffix == ".jsonl" or (
        source.is_dir() and any(source.rglob("*.jsonl")) and not any(source.rglob("*.pt"))
    ):
        raise RecordingError(
            f"{source} has text of trajectories (AReaL's dump_to_file): prompts and completions, without tokens, masks "
            "and log-probabilities. It cannot be replayed; record with trajectory_debug, or with build_scheduler"
        )
    inside = source if source.is_dir() else None
    found = find_files(source, _PATTERN, "step_000000.pt or step_000000_dp_0.pt")
    for name, files in groupby(found, key=lambda file: file.parts[0]):
        trajectories = [item for file in files for item in _load(file.path, inside)]
        yield _build_step(trajectories, int(name), options, f"{source}, step {int(name)}")


def _load(path: Path, inside: Path | None) -> list[Mapping[str, torch.Tensor]]:
    content = read_torch_file(path, inside=inside, what="a file of trajectories")
    items = content if isinstance(content, list) else [content]
    for number, item in enumerate(items):
        if not isinstance(item, dict) or not all(isinstance(value, torch.Tensor) for value in item.values()):
            raise ForeignFileError(f"{path}: item {number} is no dict of tensors")
    return items


def _build_step(
    trajectories: Sequence[Mapping[str, Any]], step: int, options: ImportOptions, where: str
) -> ForeignStep:
    fields, _ = join(trajectories, where, too_large=ForeignFileError)
    versions = fields.get("versions")
    newest = int(versions.max()) if versions is not None and versions.numel() else -1
    size = options.group_size
    codec = PaddedCodec(AREAL, sampling=options.sampling, group_size=size)
    try:
        request = RolloutRequest(global_step=step, batch_size=1, policy_version=max(newest, 0))
        batch = codec.encode(fields, request)
    except BatchError as error:
        raise BatchError(f"{where}: {error}") from error
    absent = [role for role, name in AREAL.optional.items() if name not in fields]
    lacks = (*options.assumed, "terminations", *absent, *(["groups"] if size is None else []))
    return ForeignStep(step=step, batch=batch, policy_version=max(newest, 0), lacks=lacks).noted()
