"""What the pipeline gets, and whether it is what was asked for, before it is trained on or recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import BatchError, SchedulerError
from mock_scheduler.recording.reading.prompts import compare_prompts, prompts_of
from mock_scheduler.scheduler import NativeBatch, RolloutRequest, RowShard

_NUM_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the pipeline gets. ``mode``: how it came about. ``metrics`` None: the real scheduler has them."""

    request: RolloutRequest
    native: NativeBatch
    mode: str
    metrics: Mapping[str, float] | None = None
    is_replayed: bool = False


def share_of(request: RolloutRequest, shard: RowShard | None) -> int:
    """Trajectories that this process gets of the request; raises ``SchedulerError`` where the shards are not equal."""
    if shard is None:
        return request.batch_size
    if request.batch_size % shard.count:
        raise SchedulerError(
            f"{request.mode} step {request.global_step}: {request.batch_size} trajectories cannot be dealt to "
            f"{shard.count} row shards: give a batch_size that is a multiple of {shard.count}"
        )
    return request.batch_size // shard.count


def as_rollout_batch(answer: object, request: RolloutRequest) -> RolloutBatch:
    """``answer`` itself where it is a ``RolloutBatch``; raises ``SchedulerError`` otherwise."""
    if isinstance(answer, RolloutBatch):
        return answer
    raise SchedulerError(
        f"{request.mode} step {request.global_step}: get_batch returned {type(answer).__name__}; expected "
        "RolloutBatch (a framework's own batch needs build_scheduler(codec=...))"
    )


def judge_batch(
    batch: RolloutBatch,
    request: RolloutRequest,
    *,
    config: RolloutMockConfig,
    shard: RowShard | None,
    is_reporting: bool,
) -> list[str]:
    """Refuse a batch that is not what was asked for, and return what is to be reported of one that is.

    ``is_reporting`` False: nobody reads the reports, so rows are not compared for them. Whole groups are not asked of a
    shard, whose process may hold a part of each. Raises ``BatchError`` listing every problem, with the rows of another
    scheduler, the groups that are not whole and the rows that repeat others.
    """
    problems = [
        *_count_problems(batch, request, shard),
        *_scheduler_problems(batch, request),
        *_prompt_problems(batch, request, shard),
    ]
    reports: list[str] = []
    partial = [] if request.group_size is None or shard is not None else batch.partial_groups(request.group_size)
    if partial:
        text = f"{len(partial)} groups are not whole (group_size {request.group_size}): {_first(partial)}"
        if config.on_partial_groups == "error":
            problems.append(f"{text}; rollout_mock.on_partial_groups=report accepts them")
        else:
            reports.append(text)
    if config.on_duplicate_rows == "error" or (config.on_duplicate_rows == "report" and is_reporting):
        _judge_duplicates(batch, config, problems, reports)
    if problems:
        raise BatchError(_describe(problems, request))
    return reports


def _judge_duplicates(batch: RolloutBatch, config: RolloutMockConfig, problems: list[str], reports: list[str]) -> None:
    repeats = batch.duplicate_rows()
    if not repeats:
        return
    text = f"{len(repeats)} of {len(batch)} rows have the content of another row"
    if config.on_duplicate_rows == "error":
        pairs = _first([f"{row} repeats {earlier}" for row, earlier in repeats])
        problems.append(f"{text}: {pairs}; rollout_mock.on_duplicate_rows=report accepts them")
    else:
        reports.append(text)


def _count_problems(batch: RolloutBatch, request: RolloutRequest, shard: RowShard | None) -> list[str]:
    found, expected = batch.num_trajectories, share_of(request, shard)
    if found == expected:
        return []
    part = "" if shard is None else f" (row shard {shard.index} of {shard.count}, of {request.batch_size})"
    return [f"the scheduler returned {found} trajectories; {expected} were asked for{part}"]


def _scheduler_problems(batch: RolloutBatch, request: RolloutRequest) -> list[str]:
    others = Counter(
        identity.scheduler_id for identity in batch.identities if identity.scheduler_id != request.scheduler_id
    )
    if not others:
        return []
    listed = ", ".join(f"{name!r} ({count} rows)" for name, count in sorted(others.items()))
    return [f"rows of scheduler {listed} came for a request of scheduler {request.scheduler_id!r}"]


def _prompt_problems(batch: RolloutBatch, request: RolloutRequest, shard: RowShard | None) -> list[str]:
    if request.prompt_digests is None:
        return []
    difference = compare_prompts(prompts_of(batch), request, is_part=shard is not None)
    if difference is None:
        return []
    return [
        f"its prompts are not those of the pipeline: {difference.absent.total()} of {difference.num_asked} asked for "
        f"are absent, {difference.not_asked.total()} others are there (one counted per {difference.unit}; first digest "
        f"{difference.example[:16]}…)"
    ]


def _first(items: Sequence[str]) -> str:
    more = f" (and {len(items) - _NUM_SHOWN} more)" if len(items) > _NUM_SHOWN else ""
    return "; ".join(items[:_NUM_SHOWN]) + more


def _describe(problems: Sequence[str], request: RolloutRequest) -> str:
    where = f"{request.mode} step {request.global_step}"
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{where}: the answer has {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)
