"""Rollouts out of a debug dump: ``rollout_worker.type: mock``.

Contract: a ``RolloutScheduler`` that answers each request with the trajectories dumped for its step, or raises. It
builds no engine and no environment, and makes nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mock_scheduler.adapters.nexrl.files import Content, load_content
from mock_scheduler.adapters.nexrl.matching import PlannedTrajectory, match_trajectories
from mock_scheduler.adapters.nexrl.names import check_step, find_files, parse_key
from mock_scheduler.adapters.nexrl.records import (
    DumpedTrajectory,
    extra_from_plain,
    float_list,
    read_trajectories,
)
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.config.debug import DumpFormat, RolloutWorkerConfig
from mock_scheduler.digests import JSON
from mock_scheduler.errors import BatchError, RecordingError, StepNotFoundError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.text import bullet_list

PlanFunction = Callable[[RolloutRequest], Sequence[PlannedTrajectory]]
"""The trajectories that a request asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLimits:
    """What a batch must keep to be trained on. ``sampling``: of a mode's requests, by mode.

    vocab_size: token ids are below it. max_row_tokens: the longest row.
    """

    sampling: Mapping[str, SamplingParams]
    vocab_size: int
    max_row_tokens: int


class DumpFiles:
    """The files of ``trajectory_load_path`` by step, which is one file or a folder of them."""

    def __init__(self, path: Path, dump_format: DumpFormat | None) -> None:
        self.path = path
        self._format = dump_format
        self._by_step = _list_files(path, dump_format)

    @property
    def steps(self) -> list[int]:
        """The steps that are there, ascending."""
        return sorted(self._by_step)

    def load(self, step: int) -> tuple[Content, str]:
        """What was dumped for a step, and where; raises ``StepNotFoundError`` or ``TraceError``."""
        if step not in self._by_step and self.path.is_file():
            raise StepNotFoundError(
                f"rollout_worker.trajectory_load_path {self.path} holds step {self.steps[0]}, and the run asks for "
                f"step {step}: give the folder of all steps, or set max_steps so that the run ends with this step"
            )
        check_step(step, self._by_step, f"rollout_worker.trajectory_load_path {self.path}")
        path = self._by_step[step]
        content = load_content(path, dump_format=self._format)
        if "step" in content and content["step"] != step:
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
    parent = path if (path / "trajectory").is_dir() else path.parent
    kind: Literal["trajectory", "prepared_trajectories"] = "trajectory"
    if path.name == "prepared_trajectories":
        kind = "prepared_trajectories"
    found = {key.step: file for key, file in find_files(parent, kind).items()}
    if not found:
        raise RecordingError(f"{name} {path} holds no file such as trajectory/step_000000.pt")
    return found


def _stored_step(path: Path, dump_format: DumpFormat | None) -> int:
    """The step that a file says it is of; 0 where neither it nor its name says."""
    step = load_content(path, dump_format=dump_format).get("step", 0)
    if type(step) is not int or step < 0:
        raise RecordingError(f"{path}: step is {step!r}; expected a whole number of at least 0")
    return step


class DumpedRollouts:
    """Gives the pipeline what a debug dump holds; every rank has one, and all give the same batch."""

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

        Raises ``StepNotFoundError`` for a step that is not there, ``TraceError`` for a file that cannot be read,
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
        """Nothing to keep: which step comes next follows from the request."""
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
            rows.append(_build_row(dumped, planned, request))
        except BatchError as error:
            problems.append(f"trajectory {dumped.number} {dumped.label}: {error}")
    if problems:
        raise BatchError(f"{where} holds trajectories that cannot be used:{bullet_list(problems)}")
    meta = content.get("meta", {})
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
    """How the tokens were sampled, as far as the file says; what it does not say is as configured."""
    stored = content.get("sampling")
    if isinstance(stored, dict):
        try:
            return SamplingParams(**stored)
        except TypeError as error:
            raise BatchError(f"{where}: sampling is {stored}: {error}") from error
    found = {row.extra["temperature"] for row in rows if row.extra.get("temperature") is not None}
    if len(found) > 1:
        raise BatchError(f"{where}: trajectories were sampled at several temperatures: {sorted(found)}")
    if not found:
        return configured
    return SamplingParams(
        temperature=float(found.pop()),
        top_p=configured.top_p,
        top_k=configured.top_k,
        logprobs_mode=configured.logprobs_mode,
    )


def _build_row(dumped: DumpedTrajectory, planned: PlannedTrajectory, request: RolloutRequest) -> Trajectory:
    """The row; what a file of NexRL's own does not say: one reward at the last turn, this policy, terminated."""
    extra, mask = dumped.extra, dumped.mask
    if mask.shape != dumped.tokens.shape:
        raise BatchError(f"loss_mask has {len(mask)} entries for {len(dumped.tokens)} tokens")
    turn_rewards = _turn_rewards(dumped)
    versions = extra.get("policy_versions") or [request.policy_version] * len(turn_rewards)
    responses = torch.nonzero(mask).flatten().tolist()
    return Trajectory(
        identity=_row_identity(dumped, planned),
        tokens=dumped.tokens,
        response_mask=mask,
        rollout_logprobs=_logprobs(extra.get("logprobs"), mask),
        turn_rewards=turn_rewards,
        policy_versions=torch.tensor(versions, dtype=torch.int32),
        termination=_termination(extra.get("termination")),
        prompt_length=int(extra.get("prompt_length", responses[0] if responses else len(mask))),
        tag=str(extra.get("tag", planned.tag)),
        reward=dumped.reward,
        extras={name: _extra(name, value) for name, value in (extra.get("extras") or {}).items()},
    )


def _row_identity(dumped: DumpedTrajectory, planned: PlannedTrajectory) -> SampleIdentity:
    own, asked = dumped.identity, planned.identity
    if own is None:
        return asked
    if own.trajectory_key != asked.trajectory_key:
        raise BatchError(f"is {own}, and the step asks for {asked} in its place; set rollout_worker.match=ids")
    return own


def _turn_rewards(dumped: DumpedTrajectory) -> torch.Tensor:
    stored = dumped.extra.get("turn_rewards")
    if stored is not None:
        return float_list(stored, "turn_rewards").float()
    mask = dumped.mask.int()
    num_turns = int((mask.diff(prepend=mask.new_zeros(1)) == 1).sum())
    rewards = torch.zeros(num_turns, dtype=torch.float32)
    rewards[-1:] = dumped.reward
    return rewards


def _logprobs(values: object, mask: torch.Tensor) -> torch.Tensor:
    """float32, one per response token."""
    if values is None:
        return torch.zeros(int(mask.sum()), dtype=torch.float32)
    numbers = float_list(values, "logprobs")
    if len(numbers) != len(mask):
        raise BatchError(f"logprobs has {len(numbers)} entries for {len(mask)} tokens")
    return numbers[mask].float()


def _termination(value: object) -> Termination:
    if value is None:
        return Termination.TERMINATED
    known = {item.name.lower(): item for item in Termination}
    if value not in known:
        raise BatchError(f"termination is {value!r}; known: {', '.join(known)}")
    return known[str(value)]


def _extra(name: str, value: Any) -> Any:  # noqa: ANN401 - a RowValue, which torch's types make Any
    try:
        return extra_from_plain(value)
    except BatchError as error:
        raise BatchError(f"extra {name!r} {error}") from error
