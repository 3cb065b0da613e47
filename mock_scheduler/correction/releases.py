"""``verl_compat``: the weights, the mask and the metrics of a release of verl, in the place of our own.

Contract: the release computes on the padded batch as it did; states are still ours, of the rules that its keys compile
to, since its metrics cannot be merged.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mock_scheduler.config.correction.rules import CorrectionSpec
from mock_scheduler.correction.collecting import MeasuredWeights, collect_states
from mock_scheduler.correction.inputs import CorrectionInputs, CorrectionResult, read_tokens
from mock_scheduler.correction.verl import correct_as_release


def correct_inputs_as_release(inputs: CorrectionInputs, spec: CorrectionSpec) -> CorrectionResult:
    """What ``spec.release`` gives for checked inputs; raises what that release raises."""
    assert spec.release is not None
    padded = inputs if inputs.cu_seqlens is None else _pad(inputs)
    result = correct_as_release(
        spec.release,
        old_log_prob=padded.train_logprobs.detach(),
        rollout_log_prob=padded.rollout_logprobs.detach(),
        response_mask=padded.response_mask.detach(),
        arguments=spec.release_arguments,
    )
    weights, mask = result.weights, result.mask
    tokens = read_tokens(padded, "ratio_one")
    kept = mask.flatten()[tokens.places] != 0
    by_token = None if weights is None else weights.flatten()[tokens.places]
    states = collect_states(tokens, replace(spec, release=None), [], _as_measured(tokens.log_ratio, by_token), kept)
    if inputs.cu_seqlens is not None:
        places = (inputs.response_mask != 0).nonzero().flatten()
        weights = None if weights is None else _flatten(weights, tokens.places, places, inputs)
        mask = _flatten(mask, tokens.places, places, inputs)
    return CorrectionResult(
        weights=weights,
        mask=mask,
        kept=kept,
        weights_by_token=by_token,
        states=states,
        release_metrics=result.metrics,
    )


def _as_measured(log_ratio: torch.Tensor, weights: torch.Tensor | None) -> MeasuredWeights | None:
    if weights is None:
        return None
    wide = weights.double()
    return MeasuredWeights(log_weights=log_ratio, raw=log_ratio.exp(), bounded=wide, applied=wide, factor=None)


def _pad(inputs: CorrectionInputs) -> CorrectionInputs:
    """Packed inputs as padded ones, one line per sequence."""
    assert inputs.cu_seqlens is not None
    offsets = inputs.cu_seqlens.long().to(inputs.response_mask.device)
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    columns = torch.arange(width, device=offsets.device)
    inside = columns < lengths[:, None]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        lines = tensor.new_zeros(inside.shape)
        lines[inside] = tensor.detach()
        return lines

    return CorrectionInputs(
        train_logprobs=padded(inputs.train_logprobs),
        rollout_logprobs=padded(inputs.rollout_logprobs),
        response_mask=padded(inputs.response_mask),
    )


def _flatten(
    values: torch.Tensor, padded_places: torch.Tensor, places: torch.Tensor, inputs: CorrectionInputs
) -> torch.Tensor:
    flat = values.new_zeros(inputs.response_mask.shape)
    flat[places] = values.flatten()[padded_places]
    return flat
