"""What correction reads and gives, in any layout of tokens, and the one layout that it computes in.

Contract: padded ``[B, T]`` and packed ``[N]`` tensors become the same list of response tokens, sequence after sequence,
so that both give the same numbers; what is not a response token is never read, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from mock_scheduler.correction.config.rules import NanPolicy
from mock_scheduler.correction.engine.states import CorrectionStates
from mock_scheduler.errors import CorrectionError
from mock_scheduler.support.tensor_bytes import shape_text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectionInputs:
    """Log-probabilities of the tokens that a policy sampled, and which of them are response tokens.

    train_logprobs, rollout_logprobs: floating, ``[B, T]``, or ``[N]`` with ``cu_seqlens``; detached here.
    response_mask: bool, integer or floating of the same shape, nonzero on response tokens.
    cu_seqlens: integer ``[S + 1]``, where the S sequences of packed tensors start.
    logprob_valid: bool, False where the engine gave no log-probability; ``None``: it gave all.
    turn_ids: integer ≥ 0, the turn of each token within its sequence, for rules of level ``segment``; ``None``: each
    unbroken run of response tokens is a turn.
    positions: integer, which response token of its sequence it is; ``None``: counted.
    versions_behind: integer ≥ 0, by how many policy versions the sampling policy was older than that which trains.
    advantages: floating, for rules that ask for their sign.
    Tensors of tokens have the shape of ``response_mask``. Of a context-parallel group every rank has its own tokens of
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
        """Of weights: float32, or the wider of the log-probabilities' dtypes."""
        widest = torch.promote_types(self.train_logprobs.dtype, self.rollout_logprobs.dtype)
        return torch.promote_types(widest, torch.float32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that has one entry per token, by name."""
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
    """weights: of the inputs' shape, float32 or the wider of the inputs' dtypes, 0 where ``response_mask`` is; ``None``
    without weights. mask: ``response_mask`` without rejected tokens, in its own dtype. Neither has a gradient.
    kept: bool ``[M]``, weights_by_token: ``[M]`` or ``None``: the same for the M response tokens in their order.
    release_metrics: with ``verl_compat``, what that release logs of this batch, by its names."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    kept: torch.Tensor
    weights_by_token: torch.Tensor | None
    states: CorrectionStates
    release_metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnknownTokens:
    """The Q response tokens whose ratio is not known; int64 ``[Q]``. turn: as ``ResponseTokens.turns``."""

    sequence: torch.Tensor
    turn: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResponseTokens:
    """The M response tokens of S sequences whose ratio is known, sequence after sequence.

    log_ratio: float64 ``[M]``, finite; train, rollout: alike, of the inputs' dtypes. lengths: int64 ``[S]`` on the CPU.
    places: int64 ``[M]``, in the flat inputs. is_known: bool, of all response tokens; ``None`` where it is True
    throughout. dtype: of weights and of comparisons with bounds. assumed: int64 ``[Q]``, the sequences of the Q tokens
    whose ratio was taken for 1. turns: int64 ``[M]``, ``turn_ids`` or else the number of the run that a token is in.
    The others ``[M]`` where given.
    """

    log_ratio: torch.Tensor
    train: torch.Tensor
    rollout: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    is_known: torch.Tensor | None
    unknown: UnknownTokens
    assumed: torch.Tensor
    has_turn_ids: bool
    turns: torch.Tensor | None
    positions: torch.Tensor | None
    versions_behind: torch.Tensor | None
    advantages: torch.Tensor | None

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    def sequence(self) -> torch.Tensor:
        """int64 ``[M]``: the sequence of every token."""
        return _repeat(self.lengths, self.log_ratio.device, len(self.log_ratio))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[M]`` in the inputs' shape, 0 (False) where there is no response token or its ratio is not known."""
        if len(values) == self.shape.numel():
            return values.view(self.shape)
        return values.new_zeros(self.shape.numel()).scatter_(0, self.places, values).view(self.shape)

    def with_unknown(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[M]`` of all response tokens, 0 (False) for those whose ratio is not known."""
        if self.is_known is None:
            return values
        every = values.new_zeros(len(self.is_known))
        every[self.is_known] = values
        return every


def _repeat(lengths: torch.Tensor, device: torch.device, total: int) -> torch.Tensor:
    index = torch.arange(len(lengths), device=device)
    return torch.repeat_interleave(index, lengths.to(device), output_size=total)


def count_positions(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """int64 ``[total]``: which of its run each entry is, for runs of these lengths, on their device."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
    return torch.arange(total, device=lengths.device) - starts


def check_inputs(inputs: CorrectionInputs) -> None:
    """Raise ``CorrectionError`` naming every tensor of another shape, dtype or device, and offsets that do not fit."""
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


def read_tokens(
    inputs: CorrectionInputs, nan_policy: NanPolicy, *, batch: CorrectionInputs, needs_turns: bool = False
) -> ResponseTokens:
    """The response tokens of checked inputs.

    A token whose log-probabilities or their difference are not finite, or not valid, is an error, or taken for as
    likely in both policies as in the one that is known (``ratio_one``), or in no statistic (``reject``).
    Raises ``CorrectionError`` that names how many, and the first, of ``batch``, of which the inputs are a part.
    """
    # Of a comparison with 0 the same, which takes ten times as long.
    mask = inputs.response_mask.bool()
    places = _places(mask)
    turns = None
    if needs_turns:
        turns = inputs.turn_ids if inputs.turn_ids is not None else _run_starts(mask, inputs.cu_seqlens).cumsum(0) - 1
    lengths = _lengths(places, mask, inputs.cu_seqlens)

    def at(tensor: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
        return None if tensor is None else _take(tensor.detach().flatten(), places)

    train, rollout = (
        _take(tensor.detach().flatten(), places) for tensor in (inputs.train_logprobs, inputs.rollout_logprobs)
    )
    if inputs.logprob_valid is not None:
        rollout = torch.where(_take(inputs.logprob_valid.flatten(), places).bool(), rollout, torch.nan)
    log_ratio = train.double() - rollout.double()
    is_known: torch.Tensor | None = None
    unknown = UnknownTokens(sequence=places[:0], turn=places[:0])
    assumed, positions = places[:0], inputs.positions
    if not _all_finite(log_ratio):
        finite = log_ratio.isfinite()
        if nan_policy == "error":
            _refuse_unknown(batch)
        sequence = _repeat(lengths, places.device, len(places))
        if nan_policy == "ratio_one":
            assumed = sequence[~finite]
            train = torch.where(train.isfinite(), train, torch.where(rollout.isfinite(), rollout, 0.0))
            rollout, log_ratio = torch.where(finite, rollout, train), torch.where(finite, log_ratio, 0.0)
        else:
            is_known = finite
            unknown = UnknownTokens(sequence=sequence[~finite], turn=at(turns, places[~finite]))
            if positions is None:
                # Counted later they would leave out the tokens that are not known.
                positions = places.new_zeros(mask.shape)
                positions.view(-1)[places] = count_positions(lengths.to(places.device), len(places))
            lengths = lengths - torch.bincount(unknown.sequence, minlength=len(lengths)).cpu()
            train, rollout, log_ratio, places = (values[finite] for values in (train, rollout, log_ratio, places))
    return ResponseTokens(
        log_ratio=log_ratio,
        train=train,
        rollout=rollout,
        lengths=lengths,
        places=places,
        shape=mask.shape,
        dtype=inputs.dtype,
        is_known=is_known,
        unknown=unknown,
        assumed=assumed,
        has_turn_ids=inputs.turn_ids is not None,
        turns=at(turns, places),
        positions=at(positions, places),
        versions_behind=at(inputs.versions_behind, places),
        advantages=at(inputs.advantages, places),
    )


def _places(mask: torch.Tensor) -> torch.Tensor:
    """int64 ``[M]``: where the flat mask is True."""
    flat = mask.flatten()
    if not flat.is_cpu:
        return flat.nonzero().flatten()
    # numpy takes a fifth of torch's time.
    array = flat.numpy()
    return torch.arange(len(flat)) if array.all() else torch.from_numpy(np.flatnonzero(array))


def _take(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The values at these places, which rise."""
    return flat if len(places) == len(flat) else flat.index_select(0, places)


def _all_finite(values: torch.Tensor) -> bool:
    """Whether neither NaN nor an infinity is among them; one of them would be in the sum, which costs least."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _lengths(places: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Response tokens of every sequence, int64 ``[S]`` on the CPU."""
    if cu_seqlens is None:
        limits = torch.arange(len(mask) + 1, device=mask.device) * mask.shape[1]
    else:
        limits = cu_seqlens.long().to(mask.device)
    return torch.searchsorted(places, limits).diff().cpu()


def _run_starts(mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """bool, flat: where an unbroken run of response tokens begins."""
    before = torch.zeros_like(mask)
    if cu_seqlens is None:
        before[:, 1:] = mask[:, :-1]
    else:
        before[1:] = mask[:-1]
        starts = cu_seqlens[:-1].long().to(mask.device)
        before[starts[starts < len(mask)]] = False
    return (mask & ~before).flatten()


def _refuse_unknown(inputs: CorrectionInputs) -> NoReturn:
    is_known = read_tokens(inputs, "reject", batch=inputs).is_known
    assert is_known is not None
    places = _places(inputs.response_mask.bool())
    first = int(places[~is_known][0])
    train, rollout = float(inputs.train_logprobs.flatten()[first]), float(inputs.rollout_logprobs.flatten()[first])
    width = inputs.response_mask.shape[-1]
    place = f"row {first // width}, column {first % width}" if inputs.cu_seqlens is None else f"token {first}"
    raise CorrectionError(
        f"rollout correction: {int((~is_known).sum())} of {len(is_known)} response tokens have no finite "
        f"log-probability, the first at {place} (training {train}, rollout {rollout}); find out why, or set "
        "rollout_correction.nan_policy to reject or ratio_one"
    )
