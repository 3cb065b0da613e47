"""Holds inputs and results of correction, in the caller's layout of tokens: padded ``[B, T]`` or packed ``[N]``.

Contract: ``check_inputs`` refuses shapes, dtypes and offsets that do not fit, all of them in one error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.correction.engine.states import CorrectionStates
from mock_scheduler.errors import CorrectionError
from mock_scheduler.support.tensor_bytes import shape_text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionInputs:
    """Holds log-probabilities of the tokens that a policy sampled, and a mask of the response tokens.

    train_logprobs, rollout_logprobs: floating, ``[B, T]``, or ``[N]`` with ``cu_seqlens``; detached here.
    response_mask: bool, integer or floating of the same shape, nonzero on response tokens.
    cu_seqlens: integer ``[S + 1]``, the starts of the S packed sequences, and N.
    logprob_valid: bool, False where the engine gave no log-probability; ``None``: it gave all.
    turn_ids: integer ≥ 0, the turn of each token within its sequence, for rules of level ``segment``; ``None``: each
        unbroken run of response tokens is a turn.
    positions: integer, the number of the response token within its sequence, from 0; ``None``: counted.
    versions_behind: integer, the policy versions by which the sampling policy is older than the trained one; negative
        where it is newer.
    advantages: floating, for rules that ask for their sign.

    Tensors of tokens have the shape of ``response_mask``. Every rank of a context-parallel group has its own tokens of
    the same sequences, and gives ``turn_ids`` and ``positions`` where they are needed, since it cannot count them.
    """

    train_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    response_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    logprob_valid: torch.Tensor | None = None
    turn_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    versions_behind: torch.Tensor | None = None
    advantages: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of weights: float32, or the wider of the log-probabilities' dtypes."""
        widest = torch.promote_types(self.train_logprobs.dtype, self.rollout_logprobs.dtype)
        return torch.promote_types(widest, torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors with one entry per token, by name."""
        named = {
            "response_mask": self.response_mask,
            "train_logprobs": self.train_logprobs,
            "rollout_logprobs": self.rollout_logprobs,
            "logprob_valid": self.logprob_valid,
            "turn_ids": self.turn_ids,
            "positions": self.positions,
            "versions_behind": self.versions_behind,
            "advantages": self.advantages,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionResult:
    """Weights, mask and metric states of a batch; no tensor has a gradient.

    weights: of the inputs' shape, float32 or the wider of the inputs' dtypes, 0 where ``response_mask`` is; ``None``
        without weights.
    mask: ``response_mask`` without rejected tokens, in its own dtype.
    kept, weights_by_token: bool ``[M]``, and ``[M]`` or ``None``; mask and weights of the M response tokens in order.
    release_metrics: with ``verl_compat``, the metrics that the release logs of this batch, by its names.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    kept: torch.Tensor
    weights_by_token: torch.Tensor | None
    states: CorrectionStates
    release_metrics: Mapping[str, float] | None = None


def check_inputs(inputs: CorrectionInputs) -> None:
    """Raises ``CorrectionError`` that names all tensors of a wrong shape, dtype or device, and bad offsets."""
    mask = inputs.response_mask
    problems = [
        f"{name} is {shape_text(tensor)}; response_mask is {shape_text(mask)}"
        for name, tensor in inputs.tensors().items()
        if tensor.shape != mask.shape or tensor.device != mask.device
    ]
    floating = ("train_logprobs", "rollout_logprobs", "advantages")
    problems += [
        f"{name} is {shape_text(tensor)}; expected a floating dtype"
        for name, tensor in inputs.tensors().items()
        if name in floating and not tensor.is_floating_point()
    ]
    integer = ("turn_ids", "positions", "versions_behind")
    problems += [
        f"{name} is {shape_text(tensor)}; expected an integer dtype"
        for name, tensor in inputs.tensors().items()
        if name in integer and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    ]
    if inputs.cu_seqlens is None and mask.dim() != 2:
        problems.append(f"response_mask is {shape_text(mask)}; expected [B, T], or [N] with cu_seqlens")
    elif inputs.cu_seqlens is not None:
        problems += _offset_problems(inputs.cu_seqlens, mask)
    if problems:
        raise CorrectionError(f"rollout correction: {'; '.join(problems)}")


def _offset_problems(offsets: torch.Tensor, mask: torch.Tensor) -> list[str]:
    if mask.dim() != 1:
        return [f"cu_seqlens is given, and response_mask is {shape_text(mask)}; expected [N]"]
    if offsets.dim() != 1 or len(offsets) < 1 or offsets.is_floating_point():
        return [f"cu_seqlens is {shape_text(offsets)}; expected integer [S + 1]"]
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(mask) or bool((offsets.diff() < 0).any()):
        return [f"cu_seqlens must rise from 0 to {len(mask)}"]
    return []
