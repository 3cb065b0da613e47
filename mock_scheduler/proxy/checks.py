"""Checks every value that comes from outside: a live answer, a scheduler's metrics and state, a trainer's arguments.

Contract: a batch is checked before it is trained on or recorded, arguments before anything is built, read or written.
None from a real scheduler counts as no metrics or no state, since many schedulers return nothing. Every error names the
value found and the value expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.plausibility import Finding, find_impossible, find_unlikely
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import BatchError, ConfigError, SchedulerError
from mock_scheduler.proxy.random_states import RecordedStates
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.open_step import compare_prompts, prompts_of
from mock_scheduler.scheduler import BatchCodec, NativeBatch, RolloutRequest, RowShard, shown
from mock_scheduler.support.digests import JSON

_NUM_SHOWN = 5
_ACCEPTED = "rollout_mock.on_implausible_rows=report accepts them"
Plausibility: TypeAlias = Literal["strict", "error", "report", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReports:
    """Holds lines of information on an accepted batch, and warnings of data that may be wrong."""

    lines: Sequence[str]
    warnings: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer for the pipeline. ``mode``: how it came about. ``metrics`` None: the real scheduler has them.

    ``random_states``: to be set once the pipeline has the answer.
    """

    request: RolloutRequest
    native: NativeBatch
    mode: str
    metrics: Mapping[str, float] | None = None
    is_replayed: bool = False
    random_states: RecordedStates | None = None


def share_of(request: RolloutRequest, shard: RowShard | None) -> int:
    """Count the trajectories of a request for this process; raises ``SchedulerError`` where shards are not equal."""
    if shard is None:
        return request.batch_size
    if request.batch_size % shard.count:
        raise SchedulerError(
            f"{request.mode} step {request.global_step}: {request.batch_size} trajectories cannot be dealt to "
            f"{shard.count} row shards: give a batch_size that is a multiple of {shard.count}"
        )
    return request.batch_size // shard.count


def as_rollout_batch(answer: object, request: RolloutRequest) -> RolloutBatch:
    """Return ``answer`` where it is a ``RolloutBatch``; raises ``SchedulerError`` otherwise."""
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
    latest_version: int,
    codec: BatchCodec | None = None,
    is_replayed: bool = False,
) -> BatchReports:
    """Refuse a batch other than the requested one, and return the lines to report of an accepted one.

    ``is_reporting`` False: nobody reads the reports, so rows are not compared for them. A shard may hold a part of each
    group, so whole groups are asked of a whole batch only. ``latest_version``: of the newest policy that the trainer
    has named. Implausible rows of a replayed batch were accepted when it was recorded, so they are reported alone.
    Raises ``BatchError`` listing every problem, with rows of another scheduler, groups in parts, rows with the content
    of another row, and implausible ones.
    """
    problems = [
        *_count_problems(batch, request, shard, codec),
        *_scheduler_problems(batch, request),
        *_prompt_problems(batch, request, shard),
        *_codec_problems(batch, request, codec),
    ]
    reports: list[str] = []
    warnings: list[str] = []
    partial = [] if request.group_size is None or shard is not None else batch.partial_groups(request.group_size)
    if partial:
        text = f"{len(partial)} groups are not whole (group_size {request.group_size}): {_first(partial)}"
        if config.on_partial_groups == "error":
            problems.append(f"{text}; rollout_mock.on_partial_groups=report accepts them")
        else:
            reports.append(text)
    if config.on_duplicate_rows == "error" or (config.on_duplicate_rows == "report" and is_reporting):
        _judge_duplicates(batch, config, problems, reports)
    level: Plausibility = config.on_implausible_rows
    if is_replayed and level != "ignore":
        level = "report"
    latest = max(latest_version, request.policy_version)
    _judge_plausibility(batch, level, latest, problems, warnings if is_reporting else None)
    if problems:
        raise BatchError(_describe(problems, request))
    return BatchReports(lines=reports, warnings=warnings)


def _judge_plausibility(
    batch: RolloutBatch, level: Plausibility, latest: int, problems: list[str], warnings: list[str] | None
) -> None:
    """``warnings`` None: nobody reads them."""
    findings: list[Finding] = []
    if level in ("strict", "error") or (level == "report" and warnings is not None):
        findings += find_impossible(batch, latest_version=latest)
    if level == "strict" or (level != "ignore" and warnings is not None):
        findings += find_unlikely(batch)
    for finding in findings:
        if level == "strict" or (level == "error" and finding.is_impossible):
            problems.append(f"{finding.describe()}; {finding.remedy}; {_ACCEPTED}")
        elif warnings is not None:
            warnings.append(f"{finding.describe()}; {finding.remedy}")


def version_fall(
    what: str, version: int, earlier: tuple[str, int] | None, config: RolloutMockConfig, *, is_live: bool
) -> str | None:
    """Judge the policy version of a call by that of an earlier one; returns a line to report.

    ``what``: the call; ``earlier``: the earlier call and its version. Raises ``SchedulerError`` where it falls, the
    answer is live, and ``on_implausible_rows`` says so.
    """
    if earlier is None or version >= earlier[1] or config.on_implausible_rows == "ignore":
        return None
    text = (
        f"{what}: policy_version is {version}, and {earlier[0]} had {earlier[1]}: the trainer's counter of updates "
        "fell back. Go on from a checkpoint with load_state_dict, and count on from its version"
    )
    if is_live and config.on_implausible_rows != "report":
        raise SchedulerError(f"{text}; {_ACCEPTED}")
    return text


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


def _count_problems(
    batch: RolloutBatch, request: RolloutRequest, shard: RowShard | None, codec: BatchCodec | None
) -> Sequence[str]:
    if request.has_open_size:
        find_problems = getattr(codec, "count_problems", None)
        problems: Sequence[str] = [] if find_problems is None else find_problems(batch, request)
        return problems
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


def _codec_problems(batch: RolloutBatch, request: RolloutRequest, codec: BatchCodec | None) -> Sequence[str]:
    find_problems = getattr(codec, "prompt_problems", None)
    if request.prompts is None or find_problems is None:
        return []
    problems: Sequence[str] = find_problems(batch, request)
    return problems


def _first(items: Sequence[str]) -> str:
    more = f" (and {len(items) - _NUM_SHOWN} more)" if len(items) > _NUM_SHOWN else ""
    return "; ".join(items[:_NUM_SHOWN]) + more


def _describe(problems: Sequence[str], request: RolloutRequest) -> str:
    where = f"{request.mode} step {request.global_step}"
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{where}: the answer has {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def read_metrics(value: object, owner: str, request: RolloutRequest | None) -> dict[str, float]:
    """Read metrics by name, as floats, from the value of ``collect_metrics`` of class ``owner`` after ``request``."""
    metrics: dict[str, float] = {}
    wrong: list[str] = []
    for name, number in _as_dict(value, f"{owner}.collect_metrics", request, "a dict of names and numbers").items():
        if not isinstance(name, str):
            wrong.append(f"key {shown(name)} is no text")
        elif isinstance(number, str | bytes | bytearray):  # float() would read a text
            wrong.append(f"{name!r} is {shown(number)}")
        else:
            try:
                metrics[name] = float(number)  # any scalar, of torch and NumPy too
            except (TypeError, ValueError, RuntimeError, OverflowError):
                wrong.append(f"{name!r} is {shown(number)}")
    if wrong:
        raise SchedulerError(
            f"{_after(request)}: {owner}.collect_metrics gave what is no number: {'; '.join(wrong)}; expected a dict "
            "of names and numbers"
        )
    return metrics


def read_state(value: object, owner: str, request: RolloutRequest | None) -> dict[str, Any]:
    """Read the state by key from the value of ``state_dict`` of class ``owner`` after ``request``."""
    state = _as_dict(value, f"{owner}.state_dict", request, "a dict of what a checkpoint must keep, as JSON")
    wrong = [f"key {shown(key)} is no text" for key in state if not isinstance(key, str)]
    if wrong:
        raise SchedulerError(f"{_after(request)}: {owner}.state_dict: {'; '.join(wrong)}")
    return dict(state)


def _as_dict(value: object, method: str, request: RolloutRequest | None, expected: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SchedulerError(f"{_after(request)}: {method} returned {shown(value)}; expected {expected}, or None")
    return value


def _after(request: RolloutRequest | None) -> str:
    return "before the first step" if request is None else f"{request.mode} step {request.global_step}"


_MAX_RUN_ID = 128


def check_make_real(make_real: object) -> None:
    """Raise ``ConfigError`` for a value that cannot be called."""
    if not callable(make_real):
        name = type(make_real).__name__
        advice = (
            f"pass {name} or lambda: scheduler" if hasattr(make_real, "get_batch") else "pass a class or a function"
        )
        raise ConfigError(f"make_real must be a callable that builds the scheduler, found {_a(name)} {name}; {advice}")


def as_contract(contract: object) -> Contract:
    """Make the contract of a run out of the given value; raises ``ConfigError`` where it is none."""
    if isinstance(contract, Contract):
        return contract
    if not isinstance(contract, Mapping):
        raise ConfigError(
            f"contract must be a Contract, or a mapping of names to values that must match, found {shown(contract)}"
        )
    values: Mapping[str, JSON] = contract
    return Contract.of(values)


def as_plan(plan: object) -> tuple[RolloutRequest, ...]:
    """Return the planned requests, none for ``None``; raises ``SchedulerError`` for anything else."""
    if plan is None:
        return ()
    if not isinstance(plan, Sequence) or isinstance(plan, str | bytes):
        raise SchedulerError(f"plan is {shown(plan)}; expected a list of RolloutRequest")
    for index, request in enumerate(plan):
        check_request(request, f"plan[{index}]")
    return tuple(plan)


def as_names(names: object) -> tuple[str, ...]:
    """Return the names of late values; raises ``SchedulerError`` for anything else."""
    found = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else None
    if found is None or any(type(name) is not str or not name for name in found) or len(set(found)) < len(found):
        raise SchedulerError(f"late_values is {shown(names)}; expected a list of different names")
    return found


def check_request(request: object, what: str) -> None:
    """Raise ``SchedulerError`` unless it is a ``RolloutRequest``."""
    if not isinstance(request, RolloutRequest):
        raise SchedulerError(f"{what} is {shown(request)}; expected a RolloutRequest")


def check_run_id(run_id: object) -> None:
    """Raise ``SchedulerError`` unless it can name a run in each of its files; None: the run gets a new one."""
    if run_id is None:
        return
    expected = f"expected a text of 1 to {_MAX_RUN_ID} printable characters"
    if isinstance(run_id, int) and not isinstance(run_id, bool):
        raise SchedulerError(f"run_id is {run_id}; {expected}: give it as text, {str(run_id)!r}")
    if not isinstance(run_id, str) or not 0 < len(run_id) <= _MAX_RUN_ID or not run_id.isprintable():
        raise SchedulerError(f"run_id is {shown(run_id)}; {expected}")


def _a(noun: str) -> str:
    return "an" if noun[0] in "aeiouAEIOU" else "a"
