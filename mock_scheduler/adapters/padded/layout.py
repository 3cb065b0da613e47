"""How a framework lays out its padded tensors: the role of each tensor, and the columns of each row's tokens.

Contract: a layout is data. It chooses the tensors that make the core fields of a batch, and how compactly tensors
are kept; every tensor comes back bit for bit under any layout. A row's tokens are the columns from the first to the
last the attention mask marks; where it marks none, the first column alone, since every row has a token. Unmarked
columns between them are kept like any other value.

Sources of the ready-made layouts: ROLL ``env_manager/traj_env_manager.py`` and ``utils/functionals.py``
(``postprocess_generate``), verl ``trainer/ppo/ray_trainer.py`` and its agent loop, AReaL ``workflow/rlvr.py``; all of
2026.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt


class Frame(Enum):
    """The token of a tensor's column, in a row whose tokens fill columns ``start`` to ``stop`` of ``tokens``.

    ``FULL``: column c as in ``tokens``; ``SHIFTED``: one column fewer, column c is token column c + 1 (as for the
    logprobs of next tokens); ``PROMPT``: the last column is the last prompt token (padded on the left); ``RESPONSE``:
    the first column is the first token after the prompt (padded on the right).
    """

    FULL = "full"
    SHIFTED = "shifted"
    PROMPT = "prompt"
    RESPONSE = "response"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout:
    """The fields of a framework's batch by role; ``None`` or an absent field: the framework does not say.

    ``tokens``, ``attention_mask`` (not 0 where there is a token), ``response_mask`` (not 0 on tokens the policy
    sampled) are tensors ``[B, width]`` that must be there. ``rollout_logprobs`` and ``policy_versions``: one value per
    token; ``rewards``: one per token or one per row, ``rewards_later``: names that they have later in a step;
    ``turn_rewards``: per row a list of numbers, one per turn, where a turn is a run of response tokens. ``frames``: the
    frame of each known tensor; any other has the frame whose width is its own. ``is_left_padded``: rows end their
    prompts at one column (that of ``PROMPT`` tensors' width).
    ``group_ids``, ``env_ids``, ``turn_ids`` and ``trajectory_groups`` (text ``{tag}_{group}_{episode}_{seed}``) make
    the rows' identities, ``tags`` their tags. ``identity_fields``: further fields that identify the row and are no part
    of its content. ``meta``: the field holding a dict about the whole batch.
    """

    name: str
    tokens: str = "input_ids"
    attention_mask: str = "attention_mask"
    response_mask: str = "response_mask"
    rollout_logprobs: str | None = None
    rewards: str | None = None
    rewards_later: tuple[str, ...] = ()
    turn_rewards: str | None = None
    policy_versions: str | None = None
    routed_experts: str | None = None
    frames: Mapping[str, Frame] = field(default_factory=dict)
    is_left_padded: bool = False
    group_ids: str | None = None
    env_ids: str | None = None
    trajectory_groups: str | None = None
    turn_ids: str | None = None
    tags: str | None = None
    identity_fields: tuple[str, ...] = ()
    meta: str = "meta_info"

    @property
    def required(self) -> tuple[str, str, str]:
        """The tensors every batch of this layout has."""
        return self.tokens, self.attention_mask, self.response_mask

    @property
    def roles(self) -> frozenset[str]:
        """The fields that core fields of a batch are made of."""
        routed = () if self.routed_experts is None else (self.routed_experts,)
        return frozenset((*self.required, *self.optional.values(), *routed))

    @property
    def optional(self) -> dict[str, str]:
        """The fields of the roles the layout names and a batch may lack, by role; a batch says which it lacks.

        Without routed experts, of which batches recorded by earlier releases say nothing.
        """
        roles = {
            "rollout_logprobs": self.rollout_logprobs,
            "rewards": self.rewards,
            "turn_rewards": self.turn_rewards,
            "policy_versions": self.policy_versions,
        }
        return {role: name for role, name in roles.items() if name is not None}

    def fit(self, native: Mapping[str, object]) -> PaddedLayout:
        """Choose the name of the rewards that a batch has; this layout where it has none, or where none are used."""
        names = () if self.rewards is None else (self.rewards, *self.rewards_later)
        found = [name for name in names if name in native]
        return dataclasses.replace(self, rewards=found[0]) if found else self

    @property
    def all_identity_fields(self) -> frozenset[str]:
        """The fields that identify the row."""
        named = (self.group_ids, self.env_ids, self.trajectory_groups, self.turn_ids, *self.identity_fields)
        return frozenset(name for name in named if name is not None)


#: ROLL's agentic batch: everything padded on the right to the sequence length, logprobs one column shorter.
ROLL_AGENTIC = PaddedLayout(
    name="roll-agentic",
    rollout_logprobs="infer_logprobs",
    routed_experts="routed_experts",
    rewards="scores",
    turn_rewards="step_scores",
    frames={
        **dict.fromkeys(
            (
                "input_ids",
                "attention_mask",
                "position_ids",
                "response_mask",
                "prompt_mask",
                "scores",
                "routed_experts",
            ),
            Frame.FULL,
        ),
        "infer_logprobs": Frame.SHIFTED,
    },
    group_ids="group_ids",
    env_ids="env_ids",
    trajectory_groups="traj_group_id",
    turn_ids="step",
    tags="tags",
    identity_fields=("traj_id",),
)

#: ROLL's RLVR batch: whole sequences padded on the right, beside prompts padded on the left and their responses.
ROLL_RLVR = PaddedLayout(
    name="roll-rlvr",
    rollout_logprobs="infer_logprobs",
    routed_experts="routed_experts",
    rewards="scores",
    frames={
        "prompts": Frame.PROMPT,
        "responses": Frame.RESPONSE,
        **dict.fromkeys(
            ("input_ids", "attention_mask", "position_ids", "response_mask", "prompt_mask", "routed_experts"),
            Frame.FULL,
        ),
        "infer_logprobs": Frame.SHIFTED,
    },
    group_ids="prompt_id",
    tags="domain",
    identity_fields=("rollout_id",),
)

#: verl's ``DataProto``: prompts padded on the left, responses on the right, and both one after another. An agent loop
#: gives rewards as ``rm_scores``; the trainer names them ``token_level_scores`` from its advantages on.
VERL = PaddedLayout(
    name="verl",
    rollout_logprobs="rollout_log_probs",
    routed_experts="routed_experts",
    rewards="rm_scores",
    rewards_later=("token_level_scores",),
    frames={
        "prompts": Frame.PROMPT,
        **dict.fromkeys(
            ("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores"), Frame.RESPONSE
        ),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids", "routed_experts"), Frame.FULL),
    },
    is_left_padded=True,
    group_ids="uid",
    tags="data_source",
)

#: AReaL's trajectories: everything padded on the right, a policy version for each token.
AREAL = PaddedLayout(
    name="areal",
    response_mask="loss_mask",
    rollout_logprobs="logprobs",
    rewards="rewards",
    policy_versions="versions",
    routed_experts="routed_experts",
    frames={
        **dict.fromkeys(
            ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "routed_experts"), Frame.FULL
        ),
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpans:
    """Per row, int64 ``[B]``: ``starts``, the column of the first token in full tensors; ``lengths``, tokens;
    ``splits``, the token the first column of response tensors stands for. ``widths``: columns of each frame."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int64]
    widths: Mapping[Frame, int]

    def columns(self, frame: Frame) -> list[tuple[int, int, int]]:
        """Per row ``(first, stop, token)``: the tensor's columns of the row's tokens, and the token of the first."""
        width = self.widths[frame]
        if frame is Frame.FULL or frame is Frame.SHIFTED:
            offsets = (1 if frame is Frame.SHIFTED else 0) - self.starts
        else:
            offsets = self.splits - width if frame is Frame.PROMPT else self.splits
        first = np.clip(-offsets, 0, width)
        stop = np.maximum(np.clip(self.lengths - offsets, 0, width), first)
        return list(zip(first.tolist(), stop.tolist(), (first + offsets).tolist(), strict=True))


def find_spans(attention: npt.NDArray[np.bool_], layout: PaddedLayout, widths: Mapping[Frame, int]) -> RowSpans:
    """The spans of rows whose tokens ``attention`` ``[B, columns]`` marks; ``splits`` are 0 if padded on the right."""
    num_rows, width = attention.shape
    starts = attention.argmax(axis=1) if width else np.zeros(num_rows, dtype=np.int64)
    stops = width - attention[:, ::-1].argmax(axis=1) if width else np.zeros(num_rows, dtype=np.int64)
    stops = np.where(attention.any(axis=1), stops, np.minimum(starts + 1, width))
    splits = widths[Frame.PROMPT] - starts if layout.is_left_padded else np.zeros(num_rows, dtype=np.int64)
    return RowSpans(starts=starts, lengths=stops - starts, splits=splits, widths=widths)


def gather(values: npt.NDArray[Any], columns: list[tuple[int, int, int]], rows: list[int]) -> npt.NDArray[Any]:
    """The values of the given rows' columns, one row after another."""
    pieces = [values[row, columns[row][0] : columns[row][1]] for row in rows]
    return np.concatenate([values[:0].reshape(0), *pieces])


def gather_by_token(
    values: npt.NDArray[Any], columns: list[tuple[int, int, int]], rows: list[int], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """One value per token of the given rows, one row after another; 0 for tokens that have no column."""
    out = np.zeros(int(lengths[rows].sum()) if rows else 0, dtype=values.dtype)
    position = 0
    for row in rows:
        first, stop, token = columns[row]
        out[position + token : position + token + stop - first] = values[row, first:stop]
        position += int(lengths[row])
    return out
