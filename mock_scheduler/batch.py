"""The rollout batch: typed, immutable and jagged, with its rows in identity order whatever their arrival order.

Contract: a ``RolloutBatch`` that exists is consistent. Its constructor checks dtypes, offsets, order, duplicated
identities, finite values and whole groups, and lists every problem in one ``BatchError``; nothing is padded, and
nothing is repaired. Its tensors are on the CPU and must not be written to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Literal

import torch

from mock_scheduler.digests import JSON, compute_json_digest, compute_tensor_digest
from mock_scheduler.errors import BatchError

_INT64_MAX = 2**63 - 1

#: Name -> (dtype, number of dimensions) of every tensor of a batch.
TENSOR_FIELDS: Mapping[str, tuple[torch.dtype, int]] = {
    "tokens": (torch.int32, 1),
    "row_offsets": (torch.int64, 1),
    "response_mask": (torch.bool, 1),
    "rollout_logprobs": (torch.float32, 1),
    "turn_offsets": (torch.int64, 1),
    "turn_rewards": (torch.float32, 1),
    "policy_versions": (torch.int32, 1),
    "rewards": (torch.float32, 1),
    "terminations": (torch.uint8, 1),
    "prompt_lengths": (torch.int32, 1),
}


class Termination(IntEnum):
    """Why an episode ended: by its environment, by a limit, or by an abort of the engine."""

    TERMINATED = 0
    TRUNCATED = 1
    ABORTED = 2


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SampleIdentity:
    """Which row this is, independent of rank, batch and arrival; ``turn`` is 0 for a row of a whole trajectory.

    Rows that share ``(scheduler_id, group_id, episode_id)`` are one group. Raises ``BatchError`` where a number is
    no int of 0 to 2**63 - 1.
    """

    scheduler_id: str
    group_id: int
    episode_id: int
    env_id: int
    turn: int

    def __post_init__(self) -> None:
        for name, value in zip(("group_id", "episode_id", "env_id", "turn"), self.numbers, strict=True):
            if type(value) is not int or not 0 <= value <= _INT64_MAX:
                raise BatchError(f"sample identity: {name} is {value!r}; expected an int of 0 to 2**63 - 1")

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """``(group_id, episode_id, env_id, turn)``."""
        return self.group_id, self.episode_id, self.env_id, self.turn

    @property
    def group_key(self) -> tuple[str, int, int]:
        """What the rows of one group share."""
        return self.scheduler_id, self.group_id, self.episode_id

    @property
    def trajectory_key(self) -> tuple[str, int, int, int]:
        """What the rows of one trajectory share."""
        return self.scheduler_id, self.group_id, self.episode_id, self.env_id

    def __str__(self) -> str:
        return f"{self.scheduler_id}/group {self.group_id}/episode {self.episode_id}/env {self.env_id}/turn {self.turn}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens were sampled: softmax(logits / temperature), then top-k (0 is off), then top-p (1.0 is off).

    ``logprobs_mode``: ``processed`` logprobs are those of the distribution sampled from, ``raw`` those of the logits.
    """

    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: Literal["processed", "raw"]

    def __post_init__(self) -> None:
        if self.logprobs_mode not in ("processed", "raw"):
            raise BatchError(f"sampling: logprobs_mode is {self.logprobs_mode!r}; expected 'processed' or 'raw'")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One row, as an engine or environment manager hands it in.

    ``tokens`` int32 ``[T]``; ``response_mask`` bool ``[T]``, True on the tokens that the policy sampled;
    ``rollout_logprobs`` float32, one per True, in token order; ``turn_rewards`` float32 ``[K]``;
    ``policy_versions`` int32 ``[K]``; the first ``prompt_length`` tokens are the prompt.
    ``reward`` is the row's total, exact in float32; ``None`` means the correctly rounded sum of ``turn_rewards``.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedBatch:
    """A batch padded on the right: ``tokens`` int64, ``response_mask`` bool and ``rollout_logprobs`` float32, all
    ``[B, length]`` (logprobs 0 where the mask is False); ``lengths`` int64 ``[B]``."""

    tokens: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutBatch:
    """B rows in strictly increasing identity order; row i is ``tokens[row_offsets[i]:row_offsets[i + 1]]``.

    ``tokens`` int32 and ``response_mask`` bool ``[sum T]``; ``rollout_logprobs`` float32 ``[sum R]``, on response
    tokens only, in token order; ``turn_rewards`` float32 and ``policy_versions`` int32 ``[sum K]``, row i from
    ``turn_offsets[i]``; ``row_offsets``, ``turn_offsets`` int64 ``[B + 1]``; ``rewards`` float32 ``[B]``, the stored
    total of the row; ``terminations`` uint8 ``[B]`` of ``Termination``; ``prompt_lengths`` int32 ``[B]``;
    ``prompt_digests`` SHA-256 (hex) of the prompt tokens as little-endian int32. ``group_size`` is the number of
    trajectories of every group; ``None`` means that groups need not be whole.
    """

    identities: tuple[SampleIdentity, ...]
    tokens: torch.Tensor
    row_offsets: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    turn_offsets: torch.Tensor
    turn_rewards: torch.Tensor
    policy_versions: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_digests: tuple[str, ...]
    tags: tuple[str, ...]
    sampling: SamplingParams
    group_size: int | None

    def __post_init__(self) -> None:
        # The later checks index with what the earlier ones have shown to be sound.
        for problems_of in (_dtype_problems, _shape_problems, _content_problems):
            _raise_problems(problems_of(self))

    @classmethod
    def from_trajectories(
        cls, rows: Iterable[Trajectory], *, sampling: SamplingParams, group_size: int | None
    ) -> RolloutBatch:
        """The batch of these rows, in identity order; the tensors are copied.

        ``group_size`` is the number of trajectories that every (scheduler, group, episode) must have; ``None`` skips
        that check. Raises ``BatchError`` with all problems: an incomplete group, a duplicated identity, a mask,
        logprobs or turns that do not fit the row, a wrong dtype, a NaN or infinity.
        """
        ordered = sorted(rows, key=lambda row: row.identity)
        identities = tuple(row.identity for row in ordered)
        problems = [problem for row in ordered for problem in _row_problems(row)]
        _raise_problems(problems + _identity_problems(identities, group_size))
        return cls(
            identities=identities,
            tokens=_join([row.tokens for row in ordered], torch.int32),
            row_offsets=_offsets([len(row.tokens) for row in ordered]),
            response_mask=_join([row.response_mask for row in ordered], torch.bool),
            rollout_logprobs=_join([row.rollout_logprobs for row in ordered], torch.float32),
            turn_offsets=_offsets([len(row.turn_rewards) for row in ordered]),
            turn_rewards=_join([row.turn_rewards for row in ordered], torch.float32),
            policy_versions=_join([row.policy_versions for row in ordered], torch.int32),
            rewards=torch.tensor([_total_reward(row) for row in ordered], dtype=torch.float32),
            terminations=torch.tensor([row.termination for row in ordered], dtype=torch.uint8),
            prompt_lengths=torch.tensor([row.prompt_length for row in ordered], dtype=torch.int32),
            prompt_digests=tuple(_prompt_digest(row.tokens, row.prompt_length) for row in ordered),
            tags=tuple(row.tag for row in ordered),
            sampling=sampling,
            group_size=group_size,
        )

    @classmethod
    def concat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """One batch of all rows, sorted and checked anew; raises ``BatchError`` where sampling or group size differ."""
        if not batches:
            raise BatchError("concat: no batches were given")
        first = batches[0]
        for index, batch in enumerate(batches):
            if (batch.sampling, batch.group_size) != (first.sampling, first.group_size):
                raise BatchError(
                    f"concat: batch {index} has {batch.sampling} and group_size {batch.group_size}, "
                    f"batch 0 has {first.sampling} and group_size {first.group_size}"
                )
        rows = [row for batch in batches for row in batch.rows()]
        return cls.from_trajectories(rows, sampling=first.sampling, group_size=first.group_size)

    def __len__(self) -> int:
        return len(self.identities)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens per row, int64 ``[B]``."""
        return self.row_offsets.diff()

    @property
    def response_offsets(self) -> torch.Tensor:
        """Where each row's logprobs start, int64 ``[B + 1]``."""
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), self.response_mask.cumsum(0)])
        return counts[self.row_offsets]

    @property
    def response_lengths(self) -> torch.Tensor:
        """Response tokens per row, int64 ``[B]``."""
        return self.response_offsets.diff()

    @property
    def group_index(self) -> torch.Tensor:
        """int64 ``[B]``: 0 to ``num_groups`` - 1 in row order; equal where (scheduler, group, episode) are equal."""
        keys = [identity.group_key for identity in self.identities]
        index = {key: position for position, key in enumerate(dict.fromkeys(keys))}
        return torch.tensor([index[key] for key in keys], dtype=torch.int64)

    @property
    def num_groups(self) -> int:
        """Number of different (scheduler, group, episode)."""
        return len({identity.group_key for identity in self.identities})

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories; fewer than rows where a row is a turn."""
        return len({identity.trajectory_key for identity in self.identities})

    @property
    def num_rows_without_response(self) -> int:
        """Rows in which the policy sampled nothing, for example since the first prompt was too long."""
        return int((self.response_lengths == 0).sum())

    @property
    def num_duplicate_rows(self) -> int:
        """Rows whose content, identity aside, is that of an earlier row."""
        return len(self) - len({_row_content(row) for row in self.rows()})

    def rows(self) -> list[Trajectory]:
        """The rows one by one, as views of this batch; ``from_trajectories`` of them gives this batch again."""
        token_bounds, turn_bounds = self.row_offsets.tolist(), self.turn_offsets.tolist()
        response_bounds, rewards = self.response_offsets.tolist(), self.rewards.tolist()
        terminations, prompt_lengths = self.terminations.tolist(), self.prompt_lengths.tolist()
        return [
            Trajectory(
                identity=identity,
                tokens=self.tokens[token_bounds[i] : token_bounds[i + 1]],
                response_mask=self.response_mask[token_bounds[i] : token_bounds[i + 1]],
                rollout_logprobs=self.rollout_logprobs[response_bounds[i] : response_bounds[i + 1]],
                turn_rewards=self.turn_rewards[turn_bounds[i] : turn_bounds[i + 1]],
                policy_versions=self.policy_versions[turn_bounds[i] : turn_bounds[i + 1]],
                termination=Termination(terminations[i]),
                prompt_length=prompt_lengths[i],
                tag=self.tags[i],
                reward=rewards[i],
            )
            for i, identity in enumerate(self.identities)
        ]

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """The batch of these row numbers, which must be strictly increasing; its groups need not be whole.

        Raises ``BatchError`` for other orders: the rows of a batch stay in identity order.
        """
        if any(later <= earlier for earlier, later in pairwise(rows)) or not all(0 <= r < len(self) for r in rows):
            raise BatchError(f"select: rows {list(rows)} are not strictly increasing numbers of 0 to {len(self) - 1}")
        chosen = self.rows()
        return RolloutBatch.from_trajectories([chosen[r] for r in rows], sampling=self.sampling, group_size=None)

    def digest(self) -> str:
        """SHA-256 (hex) over the whole content; equal exactly where every bit of two batches is equal."""
        values: JSON = {
            "identities": [[identity.scheduler_id, *identity.numbers] for identity in self.identities],
            "prompt_digests": self.prompt_digests,
            "tags": self.tags,
            "sampling": sampling_as_json(self.sampling),
            "group_size": self.group_size,
            "tensors": {name: compute_tensor_digest(tensor) for name, tensor in self.tensors().items()},
        }
        return compute_json_digest(values)

    def is_identical(self, other: RolloutBatch) -> bool:
        """True where every bit of the content is equal: -0.0 is not 0.0, and no tolerance is applied."""
        return self.digest() == other.digest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the order of ``TENSOR_FIELDS``."""
        # The names are those of this class's own fields: this looks nothing up that may be absent.
        return {name: getattr(self, name) for name in TENSOR_FIELDS}

    def pad(self, length: int, pad_id: int = 0) -> PaddedBatch:
        """Rows padded on the right with ``pad_id`` to ``length``; raises ``BatchError`` naming rows that are longer."""
        too_long = [
            f"{identity}: {size} tokens"
            for identity, size in zip(self.identities, self.lengths.tolist(), strict=True)
            if size > length
        ]
        if too_long:
            raise BatchError(f"pad: {len(too_long)} rows are longer than {length}: {'; '.join(too_long)}")
        inside = torch.arange(length) < self.lengths[:, None]
        tokens = torch.full(inside.shape, pad_id, dtype=torch.int64)
        tokens[inside] = self.tokens.long()
        mask = torch.zeros(inside.shape, dtype=torch.bool)
        mask[inside] = self.response_mask
        rollout_logprobs = torch.zeros(inside.shape, dtype=torch.float32)
        rollout_logprobs[mask] = self.rollout_logprobs
        return PaddedBatch(tokens=tokens, response_mask=mask, rollout_logprobs=rollout_logprobs, lengths=self.lengths)


def sampling_as_json(sampling: SamplingParams) -> dict[str, JSON]:
    """The fields of ``SamplingParams`` by name; ``SamplingParams(**value)`` is the inverse."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs_mode": sampling.logprobs_mode,
    }


def _join(pieces: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)


def _offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)


def _total_reward(row: Trajectory) -> float:
    # fsum is correctly rounded, so the total does not depend on the order of the turns.
    return row.reward if row.reward is not None else math.fsum(row.turn_rewards.tolist())


def _prompt_digest(tokens: torch.Tensor, prompt_length: int) -> str:
    return hashlib.sha256(tokens[:prompt_length].numpy().astype("<i4").tobytes()).hexdigest()


def _row_content(row: Trajectory) -> str:
    tensors = (row.tokens, row.response_mask, row.rollout_logprobs, row.turn_rewards, row.policy_versions)
    rest = (row.termination, row.prompt_length, row.tag, row.reward)
    return "".join(compute_tensor_digest(tensor) for tensor in tensors) + repr(rest)


def _raise_problems(problems: list[str]) -> None:
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise BatchError(f"rollout batch has {len(problems)} problem{'s'[: len(problems) > 1]}:{lines}")


def _row_problems(row: Trajectory) -> list[str]:
    """Everything that is wrong within one row, each with the row's identity."""
    fields = (
        ("tokens", row.tokens),
        ("response_mask", row.response_mask),
        ("rollout_logprobs", row.rollout_logprobs),
        ("turn_rewards", row.turn_rewards),
        ("policy_versions", row.policy_versions),
    )
    problems = [
        f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {TENSOR_FIELDS[name][0]} with one dimension"
        for name, tensor in fields
        if tensor.dtype != TENSOR_FIELDS[name][0] or tensor.dim() != 1
    ]
    problems = problems or _row_length_problems(row)
    return [f"{row.identity}: {problem}" for problem in problems]


def _row_length_problems(row: Trajectory) -> list[str]:
    length, num_response = len(row.tokens), int(row.response_mask.sum())
    problems = []
    if length == 0:
        problems.append("it has no tokens")
    if len(row.response_mask) != length:
        problems.append(f"response_mask has {len(row.response_mask)} entries, the row has {length} tokens")
    if len(row.rollout_logprobs) != num_response:
        problems.append(
            f"rollout_logprobs has {len(row.rollout_logprobs)} entries, response_mask marks {num_response} tokens"
        )
    if len(row.turn_rewards) != len(row.policy_versions):
        problems.append(
            f"turn_rewards has {len(row.turn_rewards)} turns, policy_versions has {len(row.policy_versions)}"
        )
    if not 0 <= row.prompt_length <= length:
        problems.append(f"prompt_length is {row.prompt_length}, the row has {length} tokens")
    elif row.response_mask[: row.prompt_length].any():
        problems.append(f"response_mask is True inside the prompt of {row.prompt_length} tokens")
    if length and int(row.tokens.min()) < 0:
        problems.append(f"token id {int(row.tokens.min())} is negative")
    for name, tensor in (("rollout_logprobs", row.rollout_logprobs), ("turn_rewards", row.turn_rewards)):
        if not bool(tensor.isfinite().all()):
            problems.append(f"{name} is not finite: {tensor[~tensor.isfinite()].tolist()}")
    if row.reward is not None and not math.isfinite(row.reward):
        problems.append(f"reward is not finite: {row.reward}")
    return problems


def _identity_problems(identities: Sequence[SampleIdentity], group_size: int | None) -> list[str]:
    """Duplicated identities and incomplete groups; ``identities`` are sorted."""
    problems = [f"{later}: duplicated identity" for earlier, later in pairwise(identities) if earlier == later]
    if group_size is None:
        return problems
    members: dict[tuple[str, int, int], set[int]] = {}
    for identity in identities:
        members.setdefault(identity.group_key, set()).add(identity.env_id)
    for (scheduler_id, group_id, episode_id), env_ids in members.items():
        if len(env_ids) != group_size:
            problems.append(
                f"{scheduler_id}/group {group_id}/episode {episode_id}: group has {len(env_ids)} trajectories; "
                f"expected group_size {group_size}"
            )
    return problems


def _dtype_problems(batch: RolloutBatch) -> list[str]:
    tensors = batch.tensors()
    return [
        f"{name} is {tensors[name].dtype} {list(tensors[name].shape)} on {tensors[name].device}; "
        f"expected {dtype} with {num_dims} dimension on cpu"
        for name, (dtype, num_dims) in TENSOR_FIELDS.items()
        if tensors[name].dtype != dtype or tensors[name].dim() != num_dims or tensors[name].device.type != "cpu"
    ]


def _shape_problems(batch: RolloutBatch) -> list[str]:
    num_rows = len(batch)
    sizes = (
        ("row_offsets", len(batch.row_offsets), num_rows + 1),
        ("turn_offsets", len(batch.turn_offsets), num_rows + 1),
        ("response_mask", len(batch.response_mask), len(batch.tokens)),
        ("rollout_logprobs", len(batch.rollout_logprobs), int(batch.response_mask.sum())),
        ("policy_versions", len(batch.policy_versions), len(batch.turn_rewards)),
        ("rewards", len(batch.rewards), num_rows),
        ("terminations", len(batch.terminations), num_rows),
        ("prompt_lengths", len(batch.prompt_lengths), num_rows),
        ("prompt_digests", len(batch.prompt_digests), num_rows),
        ("tags", len(batch.tags), num_rows),
    )
    problems = [
        f"{name} has {found} entries; expected {expected}" for name, found, expected in sizes if found != expected
    ]
    for name, offsets, total, least in (
        ("row_offsets", batch.row_offsets, len(batch.tokens), 1),
        ("turn_offsets", batch.turn_offsets, len(batch.turn_rewards), 0),
    ):
        ends_wrong = len(offsets) == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != total
        if ends_wrong or bool((offsets.diff() < least).any()):
            problems.append(f"{name} must rise from 0 to {total} by at least {least} per row")
    return problems


def _content_problems(batch: RolloutBatch) -> list[str]:
    problems = [
        f"{name} has {int((~tensor.isfinite()).sum())} values that are not finite"
        for name, tensor in (
            ("rollout_logprobs", batch.rollout_logprobs),
            ("turn_rewards", batch.turn_rewards),
            ("rewards", batch.rewards),
        )
        if not bool(tensor.isfinite().all())
    ]
    if len(batch) and int(batch.tokens.min()) < 0:
        problems.append(f"token id {int(batch.tokens.min())} is negative")
    if len(batch) and int(batch.terminations.max()) > max(Termination):
        problems.append(f"terminations holds {int(batch.terminations.max())}; expected 0 to {max(Termination)}")
    if bool(((batch.prompt_lengths < 0) | (batch.prompt_lengths > batch.lengths)).any()):
        problems.append("prompt_lengths are not all within their rows")
    positions = torch.arange(len(batch.tokens)) - batch.row_offsets[:-1].repeat_interleave(batch.lengths)
    if bool((batch.response_mask & (positions < batch.prompt_lengths.repeat_interleave(batch.lengths))).any()):
        problems.append("response_mask is True inside a prompt")
    if any(later < earlier for earlier, later in pairwise(batch.identities)):
        problems.append("identities are not in increasing order")
    return problems + _identity_problems(batch.identities, batch.group_size)
