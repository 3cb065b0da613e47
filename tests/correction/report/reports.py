"""Recordings with known training log-probabilities, for the tests of the report of rollout correction."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.batch.plausibility import VALID_COLUMN
from mock_scheduler.config.instruments import TraceConfig, TraceKind, TraceLevel
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.report.builder import ReportBuilder, ReportOptions
from mock_scheduler.correction.report.presets import list_presets
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import CorrectionReport, TrainingSide
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.selection import open_sink
from mock_scheduler.trace.shards import whole
from tests.batches import SAMPLING, make_row
from tests.recording.builders import make_info
from tests.report.recordings import record

TRAINING = TrainingSide(source="config.yaml", temperature=1.0, restricts_vocabulary=False, correction=None)
ROLLOUT = -2.0


def make_rows(
    *log_ratios: Sequence[float], rewards: Sequence[float] | None = None, group_size: int = 2
) -> tuple[list[Trajectory], torch.Tensor]:
    """A trajectory of one turn for each: tokens 1, 2 and then 3, 4, …, log-probabilities of -2 in the rollout and of
    -2 and these in training, which come second."""
    rewards = rewards or [float(number % 2) for number in range(len(log_ratios))]
    rows = [
        make_row(
            number // group_size,
            number % group_size,
            tokens=[1, 2, *range(3, 3 + len(values))],
            response=[False, False, *[True] * len(values)],
            rollout_logprobs=[ROLLOUT] * len(values),
            turn_rewards=(reward,),
        )
        for number, (values, reward) in enumerate(zip(log_ratios, rewards, strict=True))
    ]
    return rows, torch.tensor([ROLLOUT + value for values in log_ratios for value in values], dtype=torch.float64)


def make_batch(rows: Sequence[Trajectory], *, sampling: SamplingParams = SAMPLING) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None)


def make_step(
    *log_ratios: Sequence[float],
    step: int = 0,
    sampling: SamplingParams = SAMPLING,
    rewards: Sequence[float] | None = None,
    group_size: int = 2,
    valid: Sequence[Sequence[bool]] | None = None,
    versions: Sequence[int] | None = None,
    policy_version: int = 0,
) -> ScoredStep:
    rows, train = make_rows(*log_ratios, rewards=rewards, group_size=group_size)
    if valid is not None:
        flags = [Ragged(torch.tensor(values, dtype=torch.bool)) for values in valid]
        rows = [replace(row, extras={VALID_COLUMN: column}) for row, column in zip(rows, flags, strict=True)]
    if versions is not None:
        numbers = [torch.tensor([version], dtype=torch.int32) for version in versions]
        rows = [replace(row, policy_versions=version) for row, version in zip(rows, numbers, strict=True)]
    info = make_info(step, policy_version=policy_version)
    return ScoredStep(info=info, batch=make_batch(rows, sampling=sampling), train_logprobs=train)


def make_report(
    *steps: ScoredStep,
    configured: CorrectionSpec | None = None,
    presets: Sequence[str] = ("decoupled_token_is",),
    num_worst: int = 3,
    training: TrainingSide = TRAINING,
    texts: Mapping[int, str] | None = None,
    next_command: str = "",
) -> CorrectionReport:
    builder = ReportBuilder(
        ReportOptions(
            recording="dumps/v1",
            run="runs/v1",
            training=training,
            configured=configured,
            presets=list_presets(presets),
            num_worst=num_worst,
            vocabulary=None if texts is None else Vocabulary(texts=texts),
        )
    )
    for step in steps:
        builder.add(step)
    return builder.build(next_command=next_command)


def advice_of(report: CorrectionReport) -> dict[str, str]:
    """Severity and title -> condition."""
    return {f"{item.severity}: {item.title}": item.condition for item in report.advice}


def write_trace(
    run: Path,
    batch: RolloutBatch,
    train_logprobs: torch.Tensor,
    *,
    step: int = 0,
    level: TraceLevel = "full",
    kind: TraceKind = "score",
    name: str = "old_logprobs",
) -> None:
    """A trace of one rank; training log-probabilities lie at the token before, and nothing lies elsewhere."""
    config = TraceConfig(level=level, kinds=[kind])
    place = RankPlace(global_rank=0, coordinates={"tp": 0})
    sink = open_sink(config, run / "trace", step=step, place=place, world_size=1)
    values = torch.full((len(batch.tokens),), math.nan, dtype=train_logprobs.dtype)
    values[batch.response_mask.nonzero().flatten() - 1] = train_logprobs
    spec = whole(name, (len(batch.tokens),))
    sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=values, dims=("token",)))
    rows = RowTable(identities=tuple(map(str, batch.identities)), lengths=tuple(batch.lengths.tolist()))
    everything = tuple(range(len(batch)))
    sink.close(StepFooter(rows=rows, update_rows=(everything,), ranks=(0,), kinds=(kind,), patterns=("*",)))


def write_run(run: Path, *, batches: Mapping[int, RolloutBatch] | None = None, config: str = "{}") -> Path:
    """``config.yaml`` and, of a completed run, ``run.json``."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(config, encoding="utf-8")
    if batches is not None:
        digests = {str(step): batch.digest() for step, batch in batches.items()}
        (run / "run.json").write_text(json.dumps({"status": "completed", "batches": digests}), encoding="utf-8")
    return run


def record_scored(folder: Path, steps: Sequence[ScoredStep], *, config: str = "{}") -> tuple[Path, Path]:
    """A recording of these steps, and a completed run that replayed it with a trace."""
    dump_dir, run = folder / "recording", folder / "run"
    for step in steps:
        record(dump_dir, {step.info.step: step.batch}, policy_version=step.info.policy_version)
        if step.train_logprobs is not None:
            write_trace(run, step.batch, step.train_logprobs, step=step.info.step)
    write_run(run, batches={step.info.step: step.batch for step in steps}, config=config)
    return dump_dir, run
