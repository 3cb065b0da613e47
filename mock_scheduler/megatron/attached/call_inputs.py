"""Reads the inputs of a model chunk's forward call by their names in ``GPTModel.forward``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

_NOT_POSITIONAL = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallInputs:
    """The tokens of one call, each ``[b, s]`` on the model's device; ``None`` where the call has none.

    packed: Megatron's ``PackedSeqParams``.
    """

    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    packed: Any = None

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors with a value for each token, by their names in a trace."""
        values = {"tokens": self.tokens, "labels": self.labels, "loss_mask": self.loss_mask}
        return {name: value for name, value in values.items() if value is not None}


class InputReader:
    """Reads the calls of one chunk. A subclass of ``GPTModel`` may order its parameters otherwise."""

    def __init__(self, gpt: GPTModel) -> None:
        parameters = inspect.signature(gpt.forward).parameters.values()
        self._names = [item.name for item in parameters if item.kind not in _NOT_POSITIONAL]

    def read(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> CallInputs:
        """Reads one call."""
        named = {**dict(zip(self._names, arguments, strict=False)), **keywords}
        return CallInputs(
            tokens=_lines(named.get("input_ids")),
            positions=_lines(named.get("position_ids")),
            labels=_lines(named.get("labels")),
            loss_mask=_lines(named.get("loss_mask")),
            packed=named.get("packed_seq_params"),
        )


def _lines(value: object) -> torch.Tensor | None:
    """Gives a tensor of ``[b, s]``; ``None`` for anything else."""
    return value.detach() if isinstance(value, torch.Tensor) and value.dim() == 2 else None
