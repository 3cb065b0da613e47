"""How a framework lays out its padded tensors: which plays which role, and which columns are which tokens.

Contract: data only. A layout decides what the core fields of a batch are made of, and how compactly the tensors are
kept; that every tensor comes back bit for bit does not depend on it.

Sources of the ready-made layouts: ROLL ``env_manager/traj_env_manager.py`` and ``utils/functionals.py``
(``postprocess_generate``), verl ``trainer/ppo/ray_trainer.py`` and its agent loop, AReaL ``workflow/rlvr.py``; all of
2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Frame(Enum):
    """Which token a tensor's column stands for, in a row whose tokens fill columns ``start`` to ``stop`` of ``tokens``.

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

    ``tokens``, ``attention_mask`` (not 0 where there is a token), ``response_mask`` (not 0 on tokens that the policy
    sampled) are tensors ``[B, width]`` that must be there. ``rollout_logprobs`` and ``policy_versions``: one value per
    token; ``rewards``: one per token or one per row; ``turn_rewards``: per row a list of numbers, one per turn, where a
    turn is a run of response tokens. ``frames``: the frame of each known tensor; any other has the frame whose width is
    its own. ``is_left_padded``: rows end their prompts at one column (that of ``PROMPT`` tensors' width).
    ``group_ids``, ``env_ids``, ``turn_ids`` and ``trajectory_groups`` (text ``{tag}_{group}_{episode}_{seed}``) make
    the rows' identities, ``tags`` their tags. ``identity_fields``: further fields that say which row it is and not what
    is in it. ``meta``: the field that holds a dict about the whole batch.
    """

    name: str
    tokens: str = "input_ids"
    attention_mask: str = "attention_mask"
    response_mask: str = "response_mask"
    rollout_logprobs: str | None = None
    rewards: str | None = None
    turn_rewards: str | None = None
    policy_versions: str | None = None
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
        """The tensors that every batch of this layout has."""
        return self.tokens, self.attention_mask, self.response_mask

    @property
    def roles(self) -> frozenset[str]:
        """The fields that core fields of a batch are made of."""
        return frozenset((*self.required, *self.optional.values()))

    @property
    def optional(self) -> dict[str, str]:
        """The fields of the roles that the layout names and a batch may lack, by role."""
        roles = {
            "rollout_logprobs": self.rollout_logprobs,
            "rewards": self.rewards,
            "turn_rewards": self.turn_rewards,
            "policy_versions": self.policy_versions,
        }
        return {role: name for role, name in roles.items() if name is not None}

    @property
    def all_identity_fields(self) -> frozenset[str]:
        """The fields that say which row it is."""
        named = (self.group_ids, self.env_ids, self.trajectory_groups, self.turn_ids, *self.identity_fields)
        return frozenset(name for name in named if name is not None)


#: ROLL's agentic batch: everything padded on the right to the sequence length, logprobs one column shorter.
ROLL_AGENTIC = PaddedLayout(
    name="roll-agentic",
    rollout_logprobs="infer_logprobs",
    rewards="scores",
    turn_rewards="step_scores",
    frames={
        "input_ids": Frame.FULL,
        "attention_mask": Frame.FULL,
        "position_ids": Frame.FULL,
        "response_mask": Frame.FULL,
        "prompt_mask": Frame.FULL,
        "scores": Frame.FULL,
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
    rewards="scores",
    frames={
        "prompts": Frame.PROMPT,
        "responses": Frame.RESPONSE,
        "input_ids": Frame.FULL,
        "attention_mask": Frame.FULL,
        "position_ids": Frame.FULL,
        "response_mask": Frame.FULL,
        "prompt_mask": Frame.FULL,
        "infer_logprobs": Frame.SHIFTED,
    },
    group_ids="prompt_id",
    tags="domain",
    identity_fields=("rollout_id",),
)

#: verl's ``DataProto``: prompts padded on the left, responses on the right, and both one after another.
VERL = PaddedLayout(
    name="verl",
    rollout_logprobs="rollout_log_probs",
    rewards="token_level_scores",
    frames={
        "prompts": Frame.PROMPT,
        "responses": Frame.RESPONSE,
        "input_ids": Frame.FULL,
        "attention_mask": Frame.FULL,
        "position_ids": Frame.FULL,
        "response_mask": Frame.RESPONSE,
        "rollout_log_probs": Frame.RESPONSE,
        "token_level_scores": Frame.RESPONSE,
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
    frames={
        "input_ids": Frame.FULL,
        "attention_mask": Frame.FULL,
        "loss_mask": Frame.FULL,
        "logprobs": Frame.FULL,
        "versions": Frame.FULL,
    },
)
