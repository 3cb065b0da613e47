"""Shapes and offsets that contradict each other: one ``ValueError`` that lists every one by its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def raise_value_error(subject: str, problems: list[str]) -> None:
    """Raise ``ValueError`` that lists the problems; nothing where there are none."""
    if problems:
        raise ValueError(f"{subject}: {'; '.join(problems)}")


def check_equal_shapes(subject: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` naming every tensor whose shape is not that of the first."""
    expected_name, expected = next(iter(tensors.items()))
    problems = [
        f"{name} has shape {list(tensor.shape)}, {expected_name} has {list(expected.shape)}"
        for name, tensor in tensors.items()
        if tensor.shape != expected.shape
    ]
    raise_value_error(subject, problems)


def size_problems(tensors: Mapping[str, torch.Tensor | None], size: int, unit: str) -> list[str]:
    """The tensors that are not ``[size]``; ``None`` is passed over. ``unit``: what one entry is of, in a message."""
    return [
        f"{name} has shape {list(tensor.shape)}; expected [{size}], one per {unit}"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.shape != (size,)
    ]


def offset_problems(name: str, offsets: torch.Tensor, *, num_segments: int, total: int) -> list[str]:
    """Offsets that are not ``[num_segments + 1]`` numbers which rise from 0 to ``total``."""
    if offsets.shape != (num_segments + 1,):
        return [f"{name} has shape {list(offsets.shape)}; expected [{num_segments + 1}]"]
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets.diff() < 0).any()):
        return [f"{name} must rise from 0 to {total}"]
    return []
