"""Matches dumped trajectories with the trajectories a step asks for, and makes rows of a batch of them.

Contract: a one-to-one match, or an error listing everything left over on either side; nothing is made up, repeated
or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mock_scheduler.adapters.nexrl.records import DumpedTrajectory, extra_from_plain, float_list, group_id_of
from mock_scheduler.batch import SampleIdentity, Termination, Trajectory
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.text import bullet_list, list_some

_Ids = tuple[str, int]
_MAX_LISTED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTrajectory:
    """A trajectory a step asks for: its identity, with turn 0, and the tag of its environment."""

    identity: SampleIdentity
    tag: str


def match_trajectories(
    dumped: Sequence[DumpedTrajectory],
    planned: Sequence[PlannedTrajectory],
    *,
    match: Literal["ids", "order"],
    where: str,
) -> list[tuple[DumpedTrajectory, PlannedTrajectory]]:
    """Every dumped trajectory with the one that it stands for; rows of several turns share one.

    ``ids``: the ids are those that this project writes, or numbers of groups with numbers of their members.
    ``order``: the k-th group is the k-th asked for, and so are its members; ids count by their size where all
    are numbers, else in the order of the file. Raises ``BatchError``.
    """
    _check_duplicates(dumped, where)
    table = _by_order(dumped, planned, where) if match == "order" else _by_ids(planned)
    unknown = sorted({row.label for row in dumped if (row.group_id, row.run_id) not in table})
    found = {table[row.group_id, row.run_id].identity for row in dumped if (row.group_id, row.run_id) in table}
    missing = [plan.identity for plan in planned if plan.identity not in found]
    if unknown or missing:
        raise BatchError(_describe(unknown, missing, planned, where))
    return [(row, table[row.group_id, row.run_id]) for row in dumped]


def _check_duplicates(dumped: Sequence[DumpedTrajectory], where: str) -> None:
    counts = Counter((row.label, row.identity.turn if row.identity else 0) for row in dumped)
    doubled = [f"{label} {count} times" for (label, _), count in counts.items() if count > 1]
    if doubled:
        raise BatchError(
            f"{where} holds trajectories of the same (group_id, run_id) more than once:{bullet_list(doubled)}\n"
            "Which of them is meant cannot be known: remove the others from the file."
        )


def _by_ids(planned: Sequence[PlannedTrajectory]) -> Mapping[_Ids, PlannedTrajectory]:
    """Keys trajectories by our own files' ids; where a group plays one episode, by its and its member's number too."""
    table = {(group_id_of(plan.identity), plan.identity.env_id): plan for plan in planned}
    episodes = {(plan.identity.group_id, plan.identity.episode_id) for plan in planned}
    if len(episodes) != len({group_id for group_id, _ in episodes}):
        return table
    for members in _groups(planned).values():
        for number, plan in enumerate(members):
            table[str(plan.identity.group_id), number] = plan
            table[str(plan.identity.group_id), plan.identity.env_id] = plan
    return table


def _by_order(
    dumped: Sequence[DumpedTrajectory], planned: Sequence[PlannedTrajectory], where: str
) -> Mapping[_Ids, PlannedTrajectory]:
    group_ids = list(dict.fromkeys(row.group_id for row in dumped))
    if all(group_id.isascii() and group_id.isdigit() for group_id in group_ids):
        group_ids.sort(key=int)
    groups = list(_groups(planned).values())
    sizes = [len({row.run_id for row in dumped if row.group_id == group_id}) for group_id in group_ids]
    wanted = [len(members) for members in groups]
    if sizes != wanted:
        raise BatchError(
            f"{where} holds {len(sizes)} groups of {_sizes(sizes)} trajectories, and the step asks for {len(wanted)} "
            f"groups of {_sizes(wanted)}: set train_env_manager.num_env_groups, group_size and rollout_batch_size to "
            "what the file holds"
        )
    table: dict[_Ids, PlannedTrajectory] = {}
    for group_id, members in zip(group_ids, groups, strict=True):
        run_ids = sorted({row.run_id for row in dumped if row.group_id == group_id})
        table |= {(group_id, run_id): plan for run_id, plan in zip(run_ids, members, strict=True)}
    return table


def _groups(planned: Sequence[PlannedTrajectory]) -> dict[str, list[PlannedTrajectory]]:
    groups: dict[str, list[PlannedTrajectory]] = {}
    for plan in sorted(planned, key=lambda plan: plan.identity):
        groups.setdefault(group_id_of(plan.identity), []).append(plan)
    return groups


def _sizes(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(sizes)))) or "no"


def _describe(
    unknown: Sequence[str], missing: Sequence[SampleIdentity], planned: Sequence[PlannedTrajectory], where: str
) -> str:
    problems = []
    if unknown:
        problems.append(f"{len(unknown)} that the step does not ask for: {list_some(unknown, _MAX_LISTED)}")
    if missing:
        labels = [f"({group_id_of(identity)}, {identity.env_id})" for identity in missing]
        problems.append(f"{len(labels)} that it asks for are not there: {list_some(labels, _MAX_LISTED)}")
    return (
        f"{where} does not hold the {len(planned)} trajectories, by (group_id, run_id), that the step asks for:"
        f"{bullet_list(problems)}\n"
        "Load the dump of this step, of a run with the same train_env_manager and rollout_batch_size; for ids of "
        "another system set rollout_worker.match=order."
    )


def build_row(dumped: DumpedTrajectory, planned: PlannedTrajectory, request: RolloutRequest) -> Trajectory:
    """Makes the row; a file of NexRL's own leaves out: one reward at the last turn, this policy, terminated."""
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
