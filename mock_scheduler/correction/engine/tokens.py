"""The one layout in which correction computes: response tokens, sequence after sequence.

Contract: padded ``[B, T]`` and packed ``[N]`` inputs become the same list of tokens, and so give the same
numbers. Other tokens are never read, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from mock_scheduler.correction.config.rules import NanPolicy
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.errors import CorrectionError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnknownTokens:
    """Holds the Q response tokens without a known ratio: sequence and turn of each, int64 ``[Q]``."""

    sequence: torch.Tensor
    turn: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResponseTokens:
    """The M response tokens of S sequences whose ratio is known, sequence after sequence.

    log_ratio: float64 ``[M]``, finite.
    train, rollout: log-probabilities ``[M]``, finite, in the dtypes of the inputs.
    lengths: int64 ``[S]`` on the CPU.
    places: int64 ``[M]``, indices into the flat inputs.
    dtype: of weights, and of comparisons with bounds.
    is_known: bool, of all response tokens; ``None`` where it is True throughout.
    assumed: int64 ``[Q]``, the sequences of the Q tokens whose ratio was taken for 1.
    turns: int64 ``[M]``, ``turn_ids``, or else the number of the run of response tokens; ``None`` where not needed.
    positions, versions_behind, advantages: ``[M]`` where given.
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
        """Returns S."""
        return len(self.lengths)

    def sequence(self) -> torch.Tensor:
        """Returns the sequence of every token, int64 ``[M]``."""
        return _repeat(self.lengths, self.log_ratio.device, len(self.log_ratio))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Lays values ``[M]`` out in the inputs' shape, with 0 (False) wherever no response token has a known ratio."""
        if len(values) == self.shape.numel():
            return values.view(self.shape)
        return values.new_zeros(self.shape.numel()).scatter_(0, self.places, values).view(self.shape)

    def with_unknown(self, values: torch.Tensor) -> torch.Tensor:
        """Adds the response tokens without a known ratio to values ``[M]``, with 0 (False) for each."""
        if self.is_known is None:
            return values
        every = values.new_zeros(len(self.is_known))
        every[self.is_known] = values
        return every


def _repeat(lengths: torch.Tensor, device: torch.device, total: int) -> torch.Tensor:
    index = torch.arange(len(lengths), device=device)
    return torch.repeat_interleave(index, lengths.to(device), output_size=total)


def count_positions(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Counts the entries of each run from 0, int64 ``[total]``, for runs of these lengths, on their device."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
    return torch.arange(total, device=lengths.device) - starts


def read_tokens(
    inputs: CorrectionInputs, nan_policy: NanPolicy, *, batch: CorrectionInputs, needs_turns: bool = False
) -> ResponseTokens:
    """Finds the response tokens of checked inputs.

    The ratio of a token is not known where a log-probability is not valid, or not finite, or their difference is not.

    Args:
        inputs: A block of ``batch``.
        nan_policy: For a token without a known ratio: ``error`` raises; ``ratio_one`` takes the log-probability of
            the policy that is known for both; ``reject`` leaves the token out of every statistic.
        batch: The whole batch, in which the error names the first such token.
        needs_turns: Whether ``turns`` are needed.

    Raises:
        CorrectionError: With ``nan_policy`` error; it says how many such tokens ``batch`` has, and the first.
    """
    # The same as a comparison with 0, which takes ten times as long.
    mask = inputs.response_mask.bool()
    places = _places(mask)
    turns = None
    if needs_turns:
        turns = inputs.turn_ids if inputs.turn_ids is not None else _run_starts(mask, inputs.cu_seqlens).cumsum(0) - 1

    def at(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _take(tensor.detach().flatten(), places)

    train, rollout = (
        _take(tensor.detach().flatten(), places) for tensor in (inputs.train_logprobs, inputs.rollout_logprobs)
    )
    if inputs.logprob_valid is not None:
        rollout = torch.where(_take(inputs.logprob_valid.flatten(), places).bool(), rollout, torch.nan)
    tokens = ResponseTokens(
        # In float64: the difference of two float32 log-probabilities is exact there.
        log_ratio=train.double() - rollout.double(),
        train=train,
        rollout=rollout,
        lengths=_lengths(places, mask, inputs.cu_seqlens),
        places=places,
        shape=mask.shape,
        dtype=inputs.dtype,
        is_known=None,
        unknown=UnknownTokens(sequence=places[:0], turn=places[:0]),
        assumed=places[:0],
        has_turn_ids=inputs.turn_ids is not None,
        turns=at(turns),
        positions=at(inputs.positions),
        versions_behind=at(inputs.versions_behind),
        advantages=at(inputs.advantages),
    )
    if _all_finite(tokens.log_ratio):
        return tokens
    if nan_policy == "error":
        _refuse_unknown(batch)
    return _assume_ratio_one(tokens) if nan_policy == "ratio_one" else _leave_out_unknown(tokens)


def _assume_ratio_one(tokens: ResponseTokens) -> ResponseTokens:
    """Takes the policies for equal at tokens without a known ratio: both have the finite log-probability, or else 0."""
    finite, train, rollout = tokens.log_ratio.isfinite(), tokens.train, tokens.rollout
    train = torch.where(train.isfinite(), train, torch.where(rollout.isfinite(), rollout, 0.0))
    return replace(
        tokens,
        train=train,
        rollout=torch.where(finite, rollout, train),
        log_ratio=torch.where(finite, tokens.log_ratio, 0.0),
        assumed=tokens.sequence()[~finite],
    )


def _leave_out_unknown(tokens: ResponseTokens) -> ResponseTokens:
    """Sets tokens without a known ratio apart."""
    finite = tokens.log_ratio.isfinite()
    lost = tokens.sequence()[~finite]
    # Positions count all response tokens, so they are counted before some are left out.
    positions = tokens.positions
    if positions is None:
        positions = count_positions(tokens.lengths.to(finite.device), len(finite))

    def known(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[finite]

    return replace(
        tokens,
        log_ratio=tokens.log_ratio[finite],
        train=tokens.train[finite],
        rollout=tokens.rollout[finite],
        lengths=tokens.lengths - torch.bincount(lost, minlength=len(tokens.lengths)).cpu(),
        places=tokens.places[finite],
        is_known=finite,
        unknown=UnknownTokens(sequence=lost, turn=None if tokens.turns is None else tokens.turns[~finite]),
        turns=known(tokens.turns),
        positions=positions[finite],
        versions_behind=known(tokens.versions_behind),
        advantages=known(tokens.advantages),
    )


def _places(mask: torch.Tensor) -> torch.Tensor:
    """The places where the flat mask is True, int64 ``[M]``."""
    flat = mask.flatten()
    if not flat.is_cpu:
        return flat.nonzero().flatten()
    # numpy takes a fifth of torch's time.
    array = flat.numpy()
    return torch.arange(len(flat)) if array.all() else torch.from_numpy(np.flatnonzero(array))


def _take(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns the values at these rising places."""
    return flat if len(places) == len(flat) else flat.index_select(0, places)


def _all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. The sum, which costs least, would be so too."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _lengths(places: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Returns the number of response tokens of every sequence, int64 ``[S]`` on the CPU."""
    if cu_seqlens is None:
        limits = torch.arange(len(mask) + 1, device=mask.device) * mask.shape[1]
    else:
        limits = cu_seqlens.long().to(mask.device)
    return torch.searchsorted(places, limits).diff().cpu()


def _run_starts(mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Flat bool: True where an unbroken run of response tokens begins."""
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
