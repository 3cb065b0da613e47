"""Digests of rows: of their prompts, as a batch holds them, and of all their content, to tell equal rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.support.digests import canonical_json

if TYPE_CHECKING:
    import torch


def compute_prompt_digest(prompt: torch.Tensor) -> str:
    """SHA-256 (hex) of a prompt's tokens, int32 ``[n]``, as ``RolloutBatch.prompt_digests`` has them."""
    return hashlib.sha256(prompt.numpy().astype("<i4").tobytes()).hexdigest()


def compute_prompt_digests(
    tokens: npt.NDArray[np.int32], row_offsets: npt.NDArray[np.int64], prompt_lengths: npt.NDArray[Any]
) -> tuple[str, ...]:
    """Returns ``compute_prompt_digest`` of every row of a batch."""
    # Little endian whatever the machine: the digest is recorded.
    content, starts = memoryview(tokens.astype("<i4").tobytes()), row_offsets[:-1]
    bounds = zip((4 * starts).tolist(), (4 * (starts + prompt_lengths)).tolist(), strict=True)
    return tuple([hashlib.sha256(content[start:stop]).hexdigest() for start, stop in bounds])


def compute_row_digests(columns: Mapping[str, Column], tags: Sequence[str]) -> list[bytes]:
    """SHA-256 of each row's part of the given columns and its tag; sizes come first, so no two rows read alike."""
    tensors = [column.row_bytes() for column in columns.values() if isinstance(column, TensorColumn)]
    texts = [column.items for column in columns.values() if not isinstance(column, TensorColumn)]
    digests = []
    for index, tag in enumerate(tags):
        parts = [content[bounds[index] : bounds[index + 1]] for content, bounds in tensors]
        # Sizes first: without them the bytes of two columns could be cut in two ways.
        head = [tag, *(len(part) for part in parts), *(items[index] for items in texts)]
        digest = hashlib.sha256(canonical_json(head).encode())
        for part in parts:
            digest.update(part.data)
        digests.append(digest.digest())
    return digests
