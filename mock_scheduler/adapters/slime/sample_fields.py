"""The core fields that one sample of slime's family says, out of its own.

Contract: a value that a sample states and no core field can hold exactly is told apart, so that the sample's own is
kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.rows import experts_are_usable
from mock_scheduler.adapters.token_lists import select_support
from mock_scheduler.batch import Termination
from mock_scheduler.errors import BatchError

#: A sample as its ``to_dict`` gives it.
SampleFields: TypeAlias = Mapping[str, Any]

TERMINATIONS = {
    "completed": Termination.TERMINATED,
    "truncated": Termination.TRUNCATED,
    "aborted": Termination.ABORTED,
    "failed": Termination.ABORTED,
    "pending": Termination.ABORTED,
}


def read_version(stated: object, version: int) -> int:
    """Reads the oldest of the sample's versions; those of another count are kept beside the core fields alone."""
    items = [str(item) for item in stated] if isinstance(stated, list) else []
    numbers = [int(item) for item in items if item.isascii() and item.isdecimal()]
    is_usable = bool(numbers) and len(numbers) == len(items) and max(numbers) <= version
    return min(numbers) if is_usable else version


def read_tag(sample: SampleFields) -> str:
    """Reads where a sample is from."""
    metadata = sample.get("metadata")
    source = metadata.get("source_name", metadata.get("data_source")) if isinstance(metadata, Mapping) else None
    return source if isinstance(source, str) else ""


def read_experts(stated: object, num_tokens: int) -> npt.NDArray[Any] | None:
    """Reads experts that can be the engine's column."""
    experts = stated.numpy() if isinstance(stated, torch.Tensor) and stated.dtype.is_signed else stated
    return experts if isinstance(experts, np.ndarray) and experts_are_usable(experts, num_tokens) else None


def read_support(
    sample: SampleFields, tokens: Sequence[int], mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Reads ids and offsets for sampled tokens alone: those of the others are cut out."""
    ids, bounds = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if ids is None or bounds is None:
        return None
    all_ids, starts = (np.asarray(value, dtype=np.int64).reshape(-1) for value in (ids, bounds))
    sizes = np.diff(starts)
    if len(starts) != len(mask) + 1 or starts[0] != 0 or starts[-1] != len(all_ids) or (sizes < 0).any():
        raise BatchError(
            f"rollout_top_p_token_offsets has {len(starts)} numbers; expected {len(mask) + 1} that rise from 0 to "
            f"{len(all_ids)}"
        )
    own = np.asarray(tokens[len(tokens) - len(mask) :], dtype=np.int64)
    return select_support(all_ids, starts, own, mask)


def is_restorable(sample: SampleFields, starts: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> bool:
    """Says whether the support of sampled tokens is all that the sample says."""
    ids, bounds = sample["rollout_top_p_token_ids"], sample["rollout_top_p_token_offsets"]
    if type(ids) is not type(bounds) or starts[-1] != len(ids):
        return False
    if isinstance(ids, torch.Tensor):
        return bool(ids.dtype == bounds.dtype == torch.int32) and ids.dim() == bounds.dim() == 1
    return isinstance(ids, list) and all(type(item) is int for item in (*ids, *bounds))
