"""``verl_compat``: the weights, the mask and the metrics of a release of verl, in the place of our own.

Contract: the release computes on the padded batch as it did, whatever the layout of the inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.correction.verl import ReleaseCorrection, correct_as_release


def correct_inputs_as_release(inputs: CorrectionInputs, spec: CorrectionSpec) -> ReleaseCorrection:
    """What ``spec.release`` gives for checked inputs, in their layout; raises what that release raises.

    Of packed inputs the weights are 0 outside of the mask, as there is no padding that a release could leave NaN in.
    """
    assert spec.release is not None
    offsets = inputs.cu_seqlens
    inside = None if offsets is None else _inside(offsets.long().to(inputs.response_mask.device))
    result = correct_as_release(
        spec.release,
        old_log_prob=_pad(inputs.train_logprobs, inside),
        rollout_log_prob=_pad(inputs.rollout_logprobs, inside),
        response_mask=_pad(inputs.response_mask, inside),
        arguments=spec.release_arguments,
    )
    if inside is None:
        return result
    weights = None
    if result.weights is not None:
        packed = result.weights[inside]
        weights = torch.where(inputs.response_mask != 0, packed, torch.zeros_like(packed))
    return replace(result, weights=weights, mask=result.mask[inside])


def _inside(offsets: torch.Tensor) -> torch.Tensor:
    """bool ``[S, longest sequence]``: which places of a padded batch have a token of the packed one."""
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    return torch.arange(width, device=offsets.device) < lengths[:, None]


def _pad(tensor: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
    """The tensor, detached; packed, as a padded one, one line per sequence."""
    if inside is None:
        return tensor.detach()
    lines = tensor.new_zeros(inside.shape)
    lines[inside] = tensor.detach()
    return lines
