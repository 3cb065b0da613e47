"""A rank's parts of the parameters and gradients that ``debug.target_param_pattern`` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mock_scheduler.adapters.nexrl.files import Content
from mock_scheduler.adapters.nexrl.names import DumpKind
from mock_scheduler.adapters.nexrl.parameters import (
    ModelLayout,
    Piece,
    check_pattern,
    cut_piece,
    matching_tensors,
    piece_content,
)
from mock_scheduler.trace.shards import ShardSpec
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.initial_weights import parameter_shapes
from pipelines.megatron.probing.state import read_state
from pipelines.megatron.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDump:
    """The tensors whose names, Megatron's or Hugging Face's, the pattern is found in."""

    pattern: str
    layout: ModelLayout

    def content(self, model: TrainedModel, kind: DumpKind) -> Content | None:
        """What this rank holds of them; None where that is nothing.

        The first is under NexRL's keys as well: ``param_name``, ``param`` or ``gradient``, ``shape``, ``dtype``,
        ``norm``, ``mean`` and ``std`` (population), of this rank's part.
        """
        if kind == "param":
            model.gather_parameters()
        pieces = [piece for spec, tensor in _values(model, kind) for piece in self._pieces(spec, tensor)]
        if not pieces:
            return None
        first = pieces[0]
        values = first.tensor.double()
        return {
            "param_name": first.name,
            kind: first.tensor,
            "shape": list(first.tensor.shape),
            "dtype": str(first.tensor.dtype),
            "norm": float(values.norm()),
            "mean": float(values.mean()),
            "std": float(values.std(correction=0)),
            "parameters": [piece_content(piece) for piece in pieces],
        }

    def _pieces(self, spec: ShardSpec, tensor: torch.Tensor) -> list[Piece]:
        chosen = matching_tensors(spec.name, spec.global_shape[0], self.pattern, self.layout)
        pieces = [cut_piece(named, spec, tensor) for named in chosen]
        return [piece for piece in pieces if piece is not None]


def build_parameter_dump(config: PipelineConfig, *, vocab_size: int) -> ParameterDump:
    """What ``debug.target_param_pattern`` chooses; raises ``ConfigError`` where that is nothing."""
    model = config.model
    layout = ModelLayout(
        num_heads=model.num_attention_heads, num_query_groups=model.query_groups, is_gated=model.swiglu
    )
    shapes = parameter_shapes(model, vocab_size=vocab_size, sequence_length=config.sequence_length)
    check_pattern(config.debug.target_param_pattern, shapes, layout)
    return ParameterDump(pattern=config.debug.target_param_pattern, layout=layout)


def _values(model: TrainedModel, kind: DumpKind) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """The parameters as the model computes with them, or its main gradients: with the distributed optimizer only the
    ranges that this rank has reduced."""
    if kind == "param":
        yield from ((local.spec, local.parameter) for local in model.parameters())
    else:
        yield from ((piece.spec, piece.tensor) for piece in read_state(model, "gradient"))
