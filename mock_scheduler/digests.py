"""Canonical JSON, digests over it and over tensors, and documents that carry their own digest.

Contract: the recording's files and the trace are written with these, so a change here changes their bytes. A *sealed*
document is a JSON object whose ``digest`` is the SHA-256 of the canonical JSON of all the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def canonical_json(value: JSON) -> str:
    """The one ASCII text of a JSON value: sorted keys, no spaces, floats in full ``repr`` precision.

    Raises ``ValueError`` where the value holds NaN or an infinity, ``TypeError`` where it is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def compute_json_digest(value: JSON) -> str:
    """SHA-256 (hex) of a JSON value's canonical text; raises as ``canonical_json``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def compute_tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a CPU tensor, over its type and shape as in ``int32[2, 3]`` and then its bytes."""
    digest = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def seal(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """The document with its ``digest``; raises as ``canonical_json``."""
    return {**document, "digest": compute_json_digest(document)}


def open_sealed(text: str | bytes) -> dict[str, Any]:
    """The document that was sealed, without its ``digest``, from its JSON in any layout.

    Raises ``ValueError`` that goes on from the document's name: ``is not JSON: …``, ``is of type list, expected an
    object``, ``does not match its digest``.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"is of type {type(document).__name__}, expected an object")
    recorded = document.pop("digest", None)
    try:
        is_intact = recorded == compute_json_digest(document)
    except (ValueError, RecursionError):  # NaN, which Python's JSON reads but a sealed document never holds
        is_intact = False
    if not is_intact:
        raise ValueError("does not match its digest")
    return document
