"""Computes rollout correction, a pure function: log-probabilities and a mask in, weights, a mask and metric states out.

Contract: nothing is random, no input is written to, and no result has a gradient. An empty batch, a batch without
response tokens and a wholly rejected batch are ordinary inputs. The only communication is over the given groups:
``context_group`` for shared units, ``batch_group`` for the mean of batch normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction import verl
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.blocks import BlockCorrection, map_blocks, split_inputs, whole_batch
from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult, check_inputs
from mock_scheduler.correction.engine.measures import MeasuredWeights
from mock_scheduler.correction.engine.sequence_sums import collect_states
from mock_scheduler.correction.engine.states import CorrectionStates
from mock_scheduler.correction.engine.units import Leveled
from mock_scheduler.correction.verl.releases import VerlRelease
from mock_scheduler.errors import CorrectionError

#: A mean weight up to this is not divided by, as in verl: all weights are (nearly) 0.
SMALLEST_MEAN_WEIGHT = 1e-8

_Part = TypeVar("_Part")


def compute_correction(
    inputs: CorrectionInputs,
    spec: CorrectionSpec,
    *,
    context_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
) -> CorrectionResult:
    """Computes weights and mask of the response tokens, and states for metrics.

    Every rank of a group must call it.

    Args:
        inputs: The batch, or this rank's part of it.
        spec: The rules. With ``release`` set, weights and mask are verl's, on one process, and states have nothing of
            single rules.
        context_group: Ranks with other tokens of the same sequences; each must be in one ``batch_group``.
        batch_group: Ranks whose weights are normalised together.

    Raises:
        CorrectionError: Shapes do not fit; a log-probability is not finite, with ``nan_policy`` error; a rule needs
            advantages or turns and the inputs lack them; more than ``max_rejected_fraction`` is rejected.
        ValueError, TypeError, ArithmeticError: Where a ``release`` raises them.
    """
    if spec.release is not None:
        check_inputs(inputs)
        _refuse_groups(spec, context_group, batch_group)
        return _correct_as_release(inputs, spec, spec.release)
    batch = _together(context_group, lambda: _Batch(inputs, spec, context_group))
    factor = batch.mean_weight(batch_group) if spec.weight is not None and spec.batch_normalize else None
    result = batch.correct(factor)
    _check_rejected(spec, result.kept, context_group)
    return result


def _together(group: dist.ProcessGroup | None, make: Callable[[], _Part]) -> _Part:
    """The result of ``make`` where no rank's call fails; else every rank raises, so that none waits for another."""
    if group is None or group.size() == 1:
        return make()
    made: list[_Part] = []
    error: CorrectionError | None = None
    try:
        made.append(make())
    except CorrectionError as own_error:
        error = own_error
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    has_failed = torch.tensor([float(error is not None)], device=device)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if bool(has_failed.item()):
        raise CorrectionError("rollout correction: another rank that shares these sequences cannot correct its tokens")
    return made[0]


def _refuse_groups(spec: CorrectionSpec, *groups: dist.ProcessGroup | None) -> None:
    if any(group is not None and group.size() > 1 for group in groups):
        raise CorrectionError(
            f"verl_compat {spec.release} computes on whole batches of one process; leave the groups out"
        )


@np.errstate(all="ignore")
def _correct_as_release(inputs: CorrectionInputs, spec: CorrectionSpec, release: VerlRelease) -> CorrectionResult:
    corrected = verl.correct(
        release,
        old_log_prob=inputs.train_logprobs.detach(),
        rollout_log_prob=inputs.rollout_logprobs.detach(),
        response_mask=inputs.response_mask.detach(),
        arguments=spec.release_arguments,
        cu_seqlens=inputs.cu_seqlens,
    )
    # A release measures log ratios that are known, or taken for 0; its rules are its own.
    spec_of_weights = replace(spec, rules=(), batch_normalize=False, nan_policy="ratio_one")
    block = BlockCorrection(inputs, spec=spec_of_weights, group=None, batch=inputs)
    places = block.tokens.places
    kept = corrected.mask.flatten()[places] != 0
    _check_rejected(spec, kept, None)
    applied = None if corrected.weights is None else corrected.weights.flatten()[places]
    states = collect_states(
        block.tokens,
        spec,
        {},
        None if applied is None else _measure_applied(applied, block),
        Leveled(values=kept, units=None),
        sequences=block.sequences,
    )
    return CorrectionResult(
        weights=corrected.weights,
        mask=corrected.mask,
        kept=kept,
        weights_by_token=applied,
        states=states,
        release_metrics=corrected.metrics,
    )


def _measure_applied(applied: torch.Tensor, block: BlockCorrection) -> MeasuredWeights:
    """Pairs a release's weights ``[M]`` with the raw ones."""
    raw = block.weights
    assert raw is not None
    log_weights, raw_by_token = (
        Leveled(values=values, units=raw.units).by_token() for values in (raw.log_weights, raw.raw)
    )
    bounded = applied.double()
    return MeasuredWeights(
        units=None, log_weights=log_weights, raw=raw_by_token, bounded=bounded, applied=bounded, factor=None
    )


def _check_rejected(spec: CorrectionSpec, kept: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    limit = spec.max_rejected_fraction
    if limit is None:
        return
    counts = torch.tensor([int((~kept).sum()), len(kept)], device=kept.device)
    if group is not None and group.size() > 1:
        # One rank alone must not raise: the others would wait for it.
        dist.all_reduce(counts, group=group)
    num_rejected, num_tokens = counts.tolist()
    if num_rejected > limit * num_tokens:
        raise CorrectionError(
            f"rollout correction rejects {num_rejected} of {num_tokens} response tokens, "
            f"{num_rejected / num_tokens:.1%}, above rollout_correction.max_rejected_fraction {limit:g}: the rollout "
            "and the training policy differ too much to train on; look at `mock-scheduler correction`"
        )


class _Batch:
    """The blocks of one call. A single block is kept; several are computed anew for each pass, and not kept."""

    def __init__(self, inputs: CorrectionInputs, spec: CorrectionSpec, group: dist.ProcessGroup | None) -> None:
        check_inputs(inputs)
        if spec.needs_advantages and inputs.advantages is None:
            raise CorrectionError("rollout correction: a rule asks for the sign of advantages, and none are given")
        is_shared = group is not None and group.size() > 1
        self._inputs = inputs
        self._has_weights = spec.weight is not None
        # Ranks that share sequences reduce them together, so all must have as many blocks.
        self._blocks = [whole_batch(inputs)] if is_shared else split_inputs(inputs)
        self._open = partial(BlockCorrection, spec=spec, group=group, batch=inputs)
        self._only = self._open(inputs) if len(self._blocks) == 1 else None

    def _map(self, compute: Callable[[BlockCorrection], _Part]) -> Iterator[_Part]:
        """Calls ``compute`` on each block, in their order."""
        if self._only is not None:
            return iter([compute(self._only)])
        return map_blocks(lambda block: compute(self._open(block.inputs)), self._blocks)

    def mean_weight(self, group: dist.ProcessGroup | None) -> float:
        """The mean of all weights: over tokens at level token, else over the means of sequences; 1 where nearly 0.

        Collective where a group is given.
        """
        parts = list(self._map(lambda computation: computation.weight_sums()))
        # One process adds with fsum, which rounds once: the cut into blocks changes no bit of the mean.
        sums, counts = (torch.cat(columns) for columns in zip(*parts, strict=True))
        if group is not None and group.size() > 1:
            both = torch.stack((sums.sum(), counts.sum()))
            dist.all_reduce(both, group=group)
            total, number = both.tolist()
        else:
            total, number = math.fsum(sums.tolist()), math.fsum(counts.tolist())
        mean = total / number if number else 0.0
        return mean if mean > SMALLEST_MEAN_WEIGHT else 1.0

    def correct(self, factor: float | None) -> CorrectionResult:
        """Joins the results of all blocks."""
        mask = torch.empty_like(self._inputs.response_mask)
        # Allocated before the blocks' own tensors, which then leave no gaps between these.
        size = mask.numel() if self._has_weights else 0
        weights, by_token = (mask.new_empty(size, dtype=self._inputs.dtype) for _ in range(2))
        kept, log_weights = mask.new_empty(mask.numel(), dtype=torch.bool), np.empty(size, dtype=np.float32)
        states: list[CorrectionStates] = []
        num_kept = num_logs = 0
        for block, part in zip(self._blocks, self._map(lambda block: block.result(factor)), strict=True):
            mask[block.place] = part.mask
            before, num_kept = num_kept, num_kept + len(part.kept)
            kept[before:num_kept] = part.kept
            if part.weights is not None and part.weights_by_token is not None:
                weights.view(mask.shape)[block.place] = part.weights
                by_token[before:num_kept] = part.weights_by_token
            before, num_logs = num_logs, num_logs + len(part.states.log_weights)
            log_weights[before:num_logs] = part.states.log_weights
            states.append(replace(part.states, log_weights=log_weights[:0]))
        return CorrectionResult(
            weights=weights.view(mask.shape) if self._has_weights else None,
            mask=mask,
            kept=_first(kept, num_kept),
            weights_by_token=_first(by_token, num_kept) if self._has_weights else None,
            states=replace(
                CorrectionStates.merge(states), log_weights=_first(torch.from_numpy(log_weights), num_logs).numpy()
            ),
        )


def _first(values: torch.Tensor, number: int) -> torch.Tensor:
    """Returns the first values, without memory for the others."""
    return values if number == len(values) else values[:number].clone()
