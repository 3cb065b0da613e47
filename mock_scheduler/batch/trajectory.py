"""One row of a rollout batch: its identity, how it was sampled, how it ended, and its tensors.

Contract: plain data. Rows are checked to fit together where a batch is made of them (``checks``). The rows of a
trajectory and the trajectories of a group are told here, and nowhere else.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.columns import RowValue
from mock_scheduler.batch.pickled import PickledByBuffers
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON

if TYPE_CHECKING:
    import torch

#: ``(scheduler_id, group_id, episode_id, env_id, turn)``, which compare as ``SampleIdentity`` does.
RowKey: TypeAlias = "tuple[str, int, int, int, int]"
#: ``(scheduler_id, group_id, episode_id, env_id)``: what the rows of one trajectory share.
TrajectoryKey: TypeAlias = "tuple[str, int, int, int]"
#: ``(scheduler_id, group_id, episode_id)``: what the trajectories of one group share.
GroupKey: TypeAlias = "tuple[str, int, int]"

_INT64_MAX = 2**63 - 1
_MAX_FLOAT = sys.float_info.max


class Termination(IntEnum):
    """Why an episode ended: by its environment, by a limit, or by an abort of the engine."""

    TERMINATED = 0
    TRUNCATED = 1
    ABORTED = 2


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SampleIdentity:
    """Identifies a row, independent of rank, batch and arrival; ``turn`` is 0 for a row of a whole trajectory.

    Rows that share ``(scheduler_id, group_id, episode_id)`` are one group. Raises ``BatchError`` where a number is
    no int of 0 to 2**63 - 1, or ``scheduler_id`` no text.
    """

    scheduler_id: str
    group_id: int
    episode_id: int
    env_id: int
    turn: int

    def __post_init__(self) -> None:
        if type(self.scheduler_id) is not str:
            raise BatchError(f"sample identity: scheduler_id is {self.scheduler_id!r}; expected a text")
        for value in (self.group_id, self.episode_id, self.env_id, self.turn):
            if type(value) is not int or not 0 <= value <= _INT64_MAX:
                raise BatchError(self._number_problem(value))

    def _number_problem(self, value: object) -> str:
        names = ("group_id", "episode_id", "env_id", "turn")
        name = next(name for name, number in zip(names, self.numbers, strict=True) if number is value)
        return f"sample identity: {name} is {value!r}; expected an int of 0 to 2**63 - 1"

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Returns ``(group_id, episode_id, env_id, turn)``."""
        return self.group_id, self.episode_id, self.env_id, self.turn

    @property
    def group_key(self) -> GroupKey:
        """Equal for the rows of one group."""
        return self.scheduler_id, self.group_id, self.episode_id

    @property
    def trajectory_key(self) -> TrajectoryKey:
        """Equal for the rows of one trajectory."""
        return self.scheduler_id, self.group_id, self.episode_id, self.env_id

    @property
    def trajectory_name(self) -> str:
        """Names the row's trajectory in words: ``default/group 1/episode 0/env 9``."""
        return f"{self.scheduler_id}/group {self.group_id}/episode {self.episode_id}/env {self.env_id}"

    def __str__(self) -> str:
        return f"{self.trajectory_name}/turn {self.turn}"


_group_of = itemgetter(0, 1, 2)


def count_groups(trajectories: Iterable[TrajectoryKey]) -> Counter[GroupKey]:
    """Number of different trajectories of each group, in the order of the groups' first appearance."""
    return Counter(map(_group_of, dict.fromkeys(trajectories)))


def partial_group_problems(group_sizes: Mapping[GroupKey, int], group_size: int) -> list[str]:
    """List groups without ``group_size`` trajectories: ``default/group 1/episode 0: 7 of 8 trajectories``."""
    return [
        f"{scheduler_id}/group {group_id}/episode {episode_id}: {size} of {group_size} trajectories"
        for (scheduler_id, group_id, episode_id), size in group_sizes.items()
        if size != group_size
    ]


def build_identities(scheduler_ids: Sequence[str], numbers: npt.NDArray[np.int64]) -> tuple[SampleIdentity, ...]:
    """The identities of rows; ``numbers``: int64 ``[B, 4]``, as ``SampleIdentity.numbers``; raises as its constructor.

    All rows are checked at once, and their fields then set a column at a time: making each by its constructor takes
    longer than the rest of a recorded step.
    """
    columns = numbers.T.tolist()
    fields = ("group_id", "episode_id", "env_id", "turn")
    if numbers.min(initial=0) < 0:  # the constructor says which
        rows = [dict(zip(fields, row, strict=True)) for row in numbers.tolist()]
        return tuple(SampleIdentity(scheduler_id=name, **row) for name, row in zip(scheduler_ids, rows, strict=True))
    identities = [SampleIdentity.__new__(SampleIdentity) for _ in scheduler_ids]
    _set_field("scheduler_id", identities, scheduler_ids)
    for field_name, values in zip(fields, columns, strict=True):
        _set_field(field_name, identities, values)
    return tuple(identities)


def _set_field(name: str, identities: Sequence[SampleIdentity], values: Iterable[object]) -> None:
    """Sets a field of objects nobody has seen yet, through its slot, since a frozen class has no setter."""
    slot: Any = SampleIdentity.__dict__[name]
    deque(map(slot.__set__, identities, values), maxlen=0)  # runs the map and keeps nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens were sampled: softmax(logits / temperature), then top-k (0 is off), then top-p (1.0 is off).

    ``logprobs_mode``: ``processed`` logprobs are of the sampled distribution, ``raw`` ones of the logits.
    Raises ``BatchError`` listing every temperature that is not 0 or more, every top_p that is not 0 to 1, and every
    value of another type (a NumPy scalar too: it would come back as a plain number).
    """

    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: Literal["processed", "raw"]

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}; expected a {words}"
            for name, value, most, words in (
                ("temperature", self.temperature, _MAX_FLOAT, "finite float or int of 0 or more"),
                ("top_p", self.top_p, 1.0, "float or int of 0 to 1"),
            )
            if type(value) not in (float, int) or not 0 <= value <= most
        ]
        if type(self.top_k) is not int:
            problems.append(f"top_k is {self.top_k!r}; expected an int")
        if self.logprobs_mode not in ("processed", "raw"):
            problems.append(f"logprobs_mode is {self.logprobs_mode!r}; expected 'processed' or 'raw'")
        if problems:
            raise BatchError(f"sampling: {'; '.join(problems)}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory(PickledByBuffers):
    """Holds one row, as an engine or environment manager hands it in.

    ``tokens`` int32 ``[T]``; ``response_mask`` bool ``[T]``, True on the tokens the policy sampled;
    ``rollout_logprobs`` float32, one per True, in token order; ``turn_rewards`` float32 ``[K]``;
    ``policy_versions`` int32 ``[K]``; the first ``prompt_length`` tokens are the prompt.
    ``reward`` is the row's total, exact in float32; ``None`` means the correctly rounded sum of ``turn_rewards``.
    ``extras``: further values by name, the same names and kinds in all rows of a batch (see ``columns.RowValue``); they
    may hold NaN and infinities, kept bit for bit.
    """

    identity: SampleIdentity
    tokens: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    turn_rewards: torch.Tensor
    policy_versions: torch.Tensor
    termination: Termination
    prompt_length: int
    tag: str
    reward: float | None = None
    extras: Mapping[str, RowValue] = field(default_factory=dict)


def sampling_as_json(sampling: SamplingParams) -> dict[str, JSON]:
    """The fields of ``SamplingParams`` by name; ``SamplingParams(**value)`` is the inverse."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs_mode": sampling.logprobs_mode,
    }
