"""AReaL's list of trajectories as a rollout batch and back, bit for bit.

A trajectory is a dict of tensors ``[B, T]`` (and values of other forms, one per row): the samples of one prompt, padded
on the right to their own T, with a policy version for each token.

Contract: all rows are joined as AReaL joins them, padded to the longest, and kept by ``PaddedCodec`` in the layout
``AREAL``; ``meta["areal"]`` has what cuts them apart again. A trajectory is a group, and its rows are the group's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, cast

import torch

from mock_scheduler.adapters.padded import AREAL, PaddedCodec
from mock_scheduler.adapters.padded.codec import ROW_COLUMN
from mock_scheduler.adapters.rows import read_about
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import BatchError, MockSchedulerError
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

META_KEY = "areal"
_VERSION = 1
#: Padded rows may be as many times larger than what they hold; one long row among five hundred short ones fits.
MAX_GROWTH = 256

Trajectory: TypeAlias = Mapping[str, Any]


class ArealCodec:
    """A ``BatchCodec`` of lists of trajectories.

    Args:
        sampling: how tokens are sampled.
        localize: gives trajectories with tensors of this process where theirs are of others.
        has_fixed_size: whether a batch has ``batch_size`` trajectories, that is prompts. Their rows vary in any case:
            AReaL leaves failed samples out.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        localize: Callable[[Sequence[Trajectory]], Sequence[Trajectory]] = list,
        has_fixed_size: bool = True,
    ) -> None:
        self._sampling, self._localize, self._has_fixed_size = sampling, localize, has_fixed_size

    def encode(self, native: Sequence[Trajectory], request: RolloutRequest) -> RolloutBatch:
        """Return the batch; the trajectories stay as they were.

        Raises:
            BatchError: trajectories have other fields, or one has a value that cannot be kept.
        """
        trajectories = self._localize(native)
        joined, wide = join(trajectories, "the rollout")
        sizes = [len(one["attention_mask"]) for one in trajectories]
        places = [(group, member) for group, size in enumerate(sizes) for member in range(size)]

        def identify(_native: object, row: int) -> SampleIdentity:
            group, member = places[row]
            return SampleIdentity(
                scheduler_id=request.scheduler_id, group_id=group, episode_id=0, env_id=member, turn=0
            )

        batch = PaddedCodec(
            AREAL,
            sampling=self._sampling,
            scheduler_id=request.scheduler_id,
            group_ids=identify,
            group_size=sizes[0] if len(set(sizes)) == 1 else None,
        ).encode(joined, request)
        about: dict[str, JSON] = {
            "version": _VERSION,
            "sizes": list(sizes),
            "widths": [one["attention_mask"].shape[1] for one in trajectories],
            "wide": sorted(wide),
        }
        return dataclasses.replace(batch, meta={**batch.meta, META_KEY: about})

    def decode(self, batch: RolloutBatch) -> list[dict[str, Any]]:
        """Return the trajectories; of a part of a batch, with the rows that are in it.

        Raises:
            BatchError: the batch was not made by this class.
        """
        about = read_about(batch, META_KEY, _VERSION, "AReaL's trajectories")
        joined = PaddedCodec(AREAL, sampling=batch.sampling).decode(batch)
        numbers = sorted(cast("TensorColumn", batch.extras[ROW_COLUMN]).values.tolist())
        bounds = list(accumulate(about["sizes"]))
        trajectories, start = [], 0
        for bound, width in zip(bounds, about["widths"], strict=True):
            stop = start + sum(number < bound for number in numbers[start:])
            if stop > start:
                trajectories.append(
                    {
                        name: _cut(value[start:stop], width if name in about["wide"] else None)
                        for name, value in joined.items()
                    }
                )
            start = stop
        return trajectories

    def count_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List what is wrong with the number of prompts in a batch."""
        if not self._has_fixed_size or batch.num_groups == request.batch_size:
            return []
        return [f"the rollout has trajectories of {batch.num_groups} prompts; {request.batch_size} were asked for"]


def _cut(value: Any, width: int | None) -> Any:  # noqa: ANN401 - a tensor, or a list
    if isinstance(value, torch.Tensor):
        return (value if width is None else value[:, :width]).clone(memory_format=torch.contiguous_format)
    return value


def join(
    trajectories: Sequence[Trajectory], where: str, too_large: type[MockSchedulerError] = BatchError
) -> tuple[dict[str, Any], set[str]]:
    """Join all rows into one batch, padded on the right with zeros to the longest; and name the fields so padded.

    Raises:
        BatchError: they have other fields.
        too_large: padding would make them too large.
    """
    if not trajectories:
        raise BatchError(f"{where} holds no trajectory")
    for number, item in enumerate(trajectories):
        if not isinstance(item, Mapping):
            raise BatchError(f"{where}: trajectory {number} is a {type(item).__name__}; expected a dict of tensors")
    names = list(trajectories[0])
    if any(list(item) != names for item in trajectories):
        raise BatchError(f"{where}: trajectories have other fields than the first one, or in another order")
    if "attention_mask" not in names:
        raise BatchError(f"{where}: trajectories have no attention_mask; found {', '.join(names)}")
    for number, item in enumerate(trajectories):
        _check_rows(item, trajectories[0], f"{where}: trajectory {number}")
    widths = [item["attention_mask"].shape[1] for item in trajectories]
    wide = {name for name in names if all(map(_is_wide, (item[name] for item in trajectories), widths))}
    growth = _describe_growth(trajectories, wide, widths)
    if growth:
        raise too_large(f"{where}: {growth}")
    joined: dict[str, Any] = {}
    for name in names:
        parts = [item[name] for item in trajectories]
        if name in wide:
            parts = [_pad(part, max(widths)) for part in parts]
        if all(isinstance(part, list) for part in parts):
            joined[name] = [value for part in parts for value in part]
            continue
        try:
            joined[name] = torch.cat(parts)
        except (RuntimeError, TypeError) as error:
            raise BatchError(f"{where}: {name} cannot be joined: {error}") from error
    return joined, wide


def _check_rows(trajectory: Trajectory, first: Trajectory, where: str) -> None:
    """Refuse fields that would not come back: of other rows, or of another type than in the first trajectory."""
    mask = trajectory["attention_mask"]
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or not len(mask):
        raise BatchError(f"{where}: attention_mask must be a tensor of rows and tokens, with at least one row")
    for name, value in trajectory.items():
        size = len(value) if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim()) else None
        if size not in (None, len(mask)):
            raise BatchError(f"{where}: {name} has {size} entries; expected one for each of its {len(mask)} rows")
        kind, expected = (getattr(one, "dtype", type(one)) for one in (value, first[name]))
        if kind != expected:
            raise BatchError(f"{where}: {name} is of {kind}, and of {expected} in the first one")


def _is_wide(value: object, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == width


def _pad(tensor: torch.Tensor, width: int) -> torch.Tensor:
    if tensor.shape[1] == width:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((tensor.shape[0], width - tensor.shape[1], *tensor.shape[2:]))], dim=1)


def _describe_growth(trajectories: Sequence[Trajectory], wide: set[str], widths: Sequence[int]) -> str:
    """Say how much padding there would be; nothing where that is bearable."""
    found = [(name, value) for one in trajectories for name, value in one.items() if isinstance(value, torch.Tensor)]
    stored = sum(value.nbytes for _, value in found)
    padded = sum(
        len(value) * max(widths) * math.prod(value.shape[2:]) * value.itemsize for name, value in found if name in wide
    )
    if padded <= MAX_GROWTH * stored:
        return ""
    return (
        f"its rows have {stored} bytes, and {padded} where all are padded to {max(widths)} tokens: more than "
        f"{MAX_GROWTH} times"
    )
