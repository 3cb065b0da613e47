"""Rollouts out of a debug dump: ``rollout_worker.type: mock``.

Contract: a ``RolloutScheduler`` that answers each request with the trajectories dumped for its step, or raises. It
builds no engine and no environment, and makes nothing up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.nexrl.config import DumpFormat, RolloutWorkerConfig
from mock_scheduler.adapters.nexrl.files import Content, as_number, load_content
from mock_scheduler.adapters.nexrl.matching import PlannedTrajectory, build_row, match_trajectories
from mock_scheduler.adapters.nexrl.names import check_step, find_files_in, parse_key
from mock_scheduler.adapters.nexrl.records import DumpedTrajectory, read_trajectories
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.errors import BatchError, RecordingError, StepNotFoundError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import bullet_list

PlanFunction = Callable[[RolloutRequest], Sequence[PlannedTrajectory]]
"""The trajectories that a request asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLimits:
    """The conditions for a batch to be trained on. ``sampling``: of a mode's requests, by mode.

    vocab_size: token ids are below it. max_row_tokens: the longest row.
    """

    sampling: Mapping[str, SamplingParams]
    vocab_size: int
    max_row_tokens: int


class DumpFiles:
    """The files of ``trajectory_load_path`` by step: one file or a folder of them."""

    def __init__(self, path: Path, dump_format: DumpFormat | None) -> None:
        self.path = path
        self._format = dump_format
        self._by_step = _list_files(path, dump_format)

    @property
    def steps(self) -> list[int]:
        """The steps present, ascending."""
        return sorted(self._by_step)

    def load(self, step: int) -> tuple[Content, str]:
        """Loads the dump of a step, with its path; raises ``StepNotFoundError`` or ``TraceError``."""
        if step not in self._by_step and self.path.is_file():
            raise StepNotFoundError(
                f"rollout_worker.trajectory_load_path {self.path} holds step {self.steps[0]}, and the run asks for "
                f"step {step}: give the folder of all steps, or set max_steps so that the run ends with this step"
            )
        check_step(step, self._by_step, f"rollout_worker.trajectory_load_path {self.path}")
        path = self._by_step[step]
        inside = None if self.path.is_file() else self.path
        content = load_content(path, dump_format=self._format, inside=inside)
        if "step" in content and as_number(content["step"]) != step:
            raise RecordingError(f"{path} says that it is of step {content['step']}; its name says {step}")
        return content, str(path)


def _list_files(path: Path, dump_format: DumpFormat | None) -> dict[int, Path]:
    name = "rollout_worker.trajectory_load_path"
    if path.is_file():
        key = parse_key(path)
        return {_stored_step(path, dump_format) if key is None else key.step: path}
    if not path.is_dir():
        raise RecordingError(
            f"{name} {path} is not there: give a file such as debug_dump/trajectory/step_000000.pt, or its folder"
        )
    # The dump's own folder is taken for its folder of trajectories.
    inside = path / "trajectory"
    found = find_files_in(inside if inside.is_dir() else path)
    if not found:
        raise RecordingError(f"{name} {path} holds no file such as trajectory/step_000000.pt")
    parts = [file.name for key, file in found.items() if key.global_rank is not None or key.update]
    if parts:
        raise RecordingError(f"{name} {path} holds {parts[0]}, of a micro-batch; give a dump's folder trajectory/")
    return {key.step: file for key, file in found.items()}


def _stored_step(path: Path, dump_format: DumpFormat | None) -> int:
    """The step a file says it is of; 0 where neither it nor its name says."""
    step = load_content(path, dump_format=dump_format).get("step", 0)
    if type(step) is not int or step < 0:
        raise RecordingError(f"{path}: step is {step!r}; expected a whole number of at least 0")
    return step


class DumpedRollouts:
    """Gives the pipeline the rollouts of a debug dump; every rank has one, and all give the same batch."""

    def __init__(self, config: RolloutWorkerConfig, plan: PlanFunction, limits: RolloutLimits) -> None:
        self._config = config
        self._plan = plan
        self._limits = limits
        self._files = DumpFiles(Path(str(config.trajectory_load_path)), config.trajectory_format)
        self._metrics: dict[str, float] = {}

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise for the first of a run's requests that could not be answered, as ``get_batch`` would."""
        for request in requests:
            self.get_batch(request)
        self._metrics = {}

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """The trajectories dumped for the step.

        Raises ``StepNotFoundError`` for an absent step, ``TraceError`` for a file that cannot be read,
        ``BatchError`` listing all trajectories that do not match the request or lack a field.
        """
        content, where = self._files.load(request.global_step)
        rows = [row for row in read_trajectories(content, where) if row.is_val == (request.mode == "val")]
        if not rows:
            raise BatchError(_nothing_of(request, where))
        matched = match_trajectories(rows, self._plan(request), match=self._config.match, where=where)
        batch = _build_batch(matched, content, request, self._config, self._limits.sampling[request.mode], where)
        self._check_limits(batch, request, where)
        self._metrics = {"rollout/dumped_trajectories": float(batch.num_trajectories)}
        return batch

    def _check_limits(self, batch: RolloutBatch, request: RolloutRequest, where: str) -> None:
        limits, problems = self._limits, []
        wanted = limits.sampling[request.mode]
        if batch.sampling != wanted:
            problems.append(f"they were sampled with {batch.sampling}, and this run has {wanted}")
        largest = int(batch.tokens.max()) if len(batch.tokens) else 0
        if largest >= limits.vocab_size:
            problems.append(f"token id {largest} is none of this run's vocabulary of {limits.vocab_size}")
        longest = int(batch.lengths.max())
        if longest > limits.max_row_tokens:
            problems.append(f"a row has {longest} tokens; sequence_length is {limits.max_row_tokens}")
        if problems:
            raise BatchError(f"the trajectories of {where} are not this run's:{bullet_list(problems)}")

    def suspend(self) -> None:
        """Nothing to stop."""

    def resume(self) -> None:
        """Nothing to start."""

    def update_weights(self, policy_version: int) -> None:
        """Nothing to load: nothing is sampled."""

    def collect_metrics(self) -> dict[str, float]:
        """Trajectories of the last batch."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, JSON]:
        """Nothing to keep: the next step follows from the request."""
        return {}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Nothing to go on from."""

    def close(self) -> None:
        """Nothing to release."""


def _nothing_of(request: RolloutRequest, where: str) -> str:
    if request.mode == "val":
        return (
            f"{where} holds no trajectories of validation (is_val), and the run asks for them at step "
            f"{request.global_step}: set eval_steps=0"
        )
    return f"{where} holds no trajectories of training"


def _build_batch(
    matched: Sequence[tuple[DumpedTrajectory, PlannedTrajectory]],
    content: Content,
    request: RolloutRequest,
    config: RolloutWorkerConfig,
    configured: SamplingParams,
    where: str,
) -> RolloutBatch:
    _check_logprobs([row for row, _ in matched], config, where)
    problems: list[str] = []
    rows = []
    for dumped, planned in matched:
        try:
            rows.append(build_row(dumped, planned, request))
        # Fields of another system may be of any type.
        except (BatchError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            problems.append(f"trajectory {dumped.number} {dumped.label}: {error}")
    if problems:
        raise BatchError(f"{where} holds trajectories that cannot be used:{bullet_list(problems)}")
    meta = content.get("meta") or {}
    if not isinstance(meta, dict):
        raise BatchError(f"{where}: meta is of type {type(meta).__name__}; expected a dict")
    sampling = _sampling(content, [row for row, _ in matched], configured, where)
    try:
        return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=request.group_size, meta=meta)
    except BatchError as error:
        raise BatchError(f"{where}: {error}") from error


def _check_logprobs(rows: Sequence[DumpedTrajectory], config: RolloutWorkerConfig, where: str) -> None:
    without = [row for row in rows if row.extra.get("logprobs") is None]
    if without and config.missing_logprobs == "error":
        raise BatchError(
            f"{where}: {len(without)} of {len(rows)} trajectories have no extra_fields.logprobs, which NexRL leaves "
            "out; they are the rollout's log-probabilities, and rollout_logprob_diff_mean and _max and rollout "
            "correction are made of them, while the loss is not: it takes the trainer's own. Set "
            "rollout_worker.missing_logprobs=zero to go on with 0 in their place"
        )


def _sampling(
    content: Content, rows: Sequence[DumpedTrajectory], configured: SamplingParams, where: str
) -> SamplingParams:
    """How the tokens were sampled, as far as the file says; all else is as configured."""
    stored = content.get("sampling")
    if isinstance(stored, dict):
        try:
            return SamplingParams(**stored)
        except TypeError as error:
            raise BatchError(f"{where}: sampling is {stored}: {error}") from error
    given = [row.extra["temperature"] for row in rows if row.extra.get("temperature") is not None]
    found = {as_number(value) for value in given}
    if any(value is None or not math.isfinite(value) for value in found):
        raise BatchError(f"{where}: temperature is {str(given[0])[:60]!r}; expected a finite number")
    temperatures = sorted(value for value in found if value is not None)
    if len(temperatures) > 1:
        raise BatchError(f"{where}: trajectories were sampled at several temperatures: {temperatures}")
    if not temperatures:
        return configured
    return SamplingParams(
        temperature=temperatures[0],
        top_p=configured.top_p,
        top_k=configured.top_k,
        logprobs_mode=configured.logprobs_mode,
    )
