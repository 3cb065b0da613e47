"""One dumped trajectory as a row of a batch."""

from __future__ import annotations

from typing import Any

import torch

from mock_scheduler.adapters.nexrl.matching import PlannedTrajectory
from mock_scheduler.adapters.nexrl.records import DumpedTrajectory, extra_from_plain, float_list
from mock_scheduler.batch import SampleIdentity, Termination, Trajectory
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest


def build_row(dumped: DumpedTrajectory, planned: PlannedTrajectory, request: RolloutRequest) -> Trajectory:
    """The row; what a file of NexRL's own does not say: one reward at the last turn, this policy, terminated."""
    extra, mask = dumped.extra, dumped.mask
    if mask.shape != dumped.tokens.shape:
        raise BatchError(f"loss_mask has {len(mask)} entries for {len(dumped.tokens)} tokens")
    if bool(mask[:1].any()):
        raise BatchError("loss_mask begins with 1, and no token predicts the first one; give the row a prompt")
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
