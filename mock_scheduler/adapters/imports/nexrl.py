"""Trajectories of NexRL's debug dumps; ``adapters.nexrl`` reads the files themselves.

Contract: a file that this project wrote gives the same batch again, to the bit, where its rows say who they are; one of
NexRL's own is grouped by ``group_id``, and numbered by ``run_id``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.nexrl.files import load_content
from mock_scheduler.adapters.nexrl.records import DumpedTrajectory, read_trajectories
from mock_scheduler.adapters.rows import ForeignRow, build_batch
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode

_PATTERN = r"(?:[^/]*/)*step_(\d+)\.(pt|jsonl)"


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, validation apart from training; raises as the other readers."""
    folder = source / "trajectory" if (source / "trajectory").is_dir() else source
    for file in find_files(folder, _PATTERN, "trajectory/step_000000.pt"):
        content = load_content(file.path, inside=folder if folder.is_dir() else None)
        rows = read_trajectories(content, str(file.path))
        stated = content.get("step")
        step = stated if type(stated) is int and stated >= 0 else int(file.parts[0])
        for mode in ("train", "val"):
            own = [row for row in rows if row.is_val == (mode == "val")]
            if own:
                yield _build_step(own, content, step, "val" if mode == "val" else "train", options, str(file.path))


def _build_step(
    rows: Sequence[DumpedTrajectory],
    content: Mapping[str, Any],
    step: int,
    mode: Mode,
    options: ImportOptions,
    where: str,
) -> ForeignStep:
    groups: dict[str, int] = {}
    built = []
    for row in rows:
        try:
            built.append(_read_row(row, groups.setdefault(row.group_id, len(groups))))
        except (BatchError, ValueError, TypeError) as error:
            raise BatchError(f"{where}: trajectory {row.number} {row.label}: {error}") from error
    sampling, assumed = _sampling_of(rows, content, options)
    batch = build_batch(
        built,
        sampling=sampling,
        scheduler_id=DEFAULT_SCHEDULER_ID,
        meta={},
        identity_fields=("group_id", "uid", "run_id", "task_id", "sample_id", "identity"),
    )
    lacks = [*assumed, "policy_versions", "terminations"]
    lacks += ["rollout_logprobs"] if all(row.extra.get("logprobs") is None for row in rows) else []
    return ForeignStep(step=step, mode=mode, batch=batch, lacks=tuple(lacks)).noted()


def _sampling_of(
    rows: Sequence[DumpedTrajectory], content: Mapping[str, Any], options: ImportOptions
) -> tuple[SamplingParams, tuple[str, ...]]:
    stored = content.get("sampling")
    if isinstance(stored, dict) and not options.stated:
        return SamplingParams(**stored), ()
    found = {row.extra.get("temperature") for row in rows}
    stated = found.pop() if len(found) == 1 else None
    if not isinstance(stated, int | float) or "temperature" in options.stated:
        return options.sampling, options.assumed
    own = options.sampling
    sampling = SamplingParams(temperature=stated, top_p=own.top_p, top_k=own.top_k, logprobs_mode=own.logprobs_mode)
    return sampling, tuple(name for name in options.assumed if name != "sampling.temperature")


def _read_row(row: DumpedTrajectory, group: int) -> ForeignRow:
    mask = row.mask.numpy()
    stated = row.extra.get("logprobs")
    logprobs = np.zeros(len(mask), dtype=np.float32) if stated is None else np.asarray(stated, dtype=np.float32)
    if len(logprobs) != len(mask):
        raise BatchError(f"has {len(logprobs)} log-probabilities of {len(mask)} tokens")
    return ForeignRow(
        tokens=row.tokens.numpy(),
        response_mask=mask,
        rollout_logprobs=logprobs[mask],
        group=group,
        member=row.run_id,
        reward=row.reward,
        prompt_length=int(mask.argmax()) if mask.any() else len(mask),
        native=dict(row.extra),
    )
