"""Makes the content of a dump's files: plain dicts of numbers and tensors.

Contract: a micro-batch's file holds ``[b, s]`` tensors, padding included, and says whose tokens these are:
``sample_ids``, the rows' identities; ``sample_index`` int64, each cell's place among them, -1 on padding; ``positions``
int64, the place in its row of a value's token, its target: values in column t are of the following token.
``response_mask`` is True where they are defined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.probe.state import read_state
from mock_scheduler.trace.shards import ShardSpec
from pipelines.batching.plan import MicroBatch
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.parameter_shapes import parameter_shapes
from pipelines.megatron.places import OwnBatch


def token_table(micro_batch: MicroBatch, batch: RolloutBatch) -> Content:
    """Says which rows and tokens of the step's batch a micro-batch's cells hold."""
    row_ids = micro_batch.row_ids.cpu()
    rows = sorted({row for row in row_ids.flatten().tolist() if row >= 0})
    place = torch.full((len(batch) + 1,), -1, dtype=torch.int64)  # the last entry is padding's, of row -1
    place[rows] = torch.arange(len(rows))
    return {
        "sample_ids": [str(batch.identities[row]) for row in rows],
        "sample_index": place[row_ids],
        "positions": micro_batch.positions.cpu() + 1,
        "input_ids": micro_batch.tokens,
        "targets": micro_batch.targets,
        "response_mask": micro_batch.response_mask,
    }


def batch_inputs(own: OwnBatch) -> Content:
    """Lists the model's inputs, and the loss's knowledge of the targets beforehand."""
    inputs = own.inputs
    return {
        "position_ids": inputs.positions,
        "attention_mask": inputs.attention_mask,
        "rollout_log_probs": own.batch.rollout_logprobs,
    }


def forward_content(outputs: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> Content:
    """Returns outputs: ``logprobs`` and ``entropy`` of the policy under training, ``[b, s]``."""
    return {
        "log_probs": outputs["logprobs"],
        "entropy": outputs["entropy"],
        "log_probs_shape": list(outputs["logprobs"].shape),
        "entropy_shape": list(outputs["entropy"].shape),
        "rollout_log_probs": micro_batch.rollout_logprobs,
    }


def loss_content(
    terms: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    micro_batch: MicroBatch,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    num_update_tokens: int,
) -> Content:
    """Lists the losses of a micro-batch's share, and everything they are made of.

    terms: as ``PolicyLossOutput.terms``. ``loss``, ``pg_loss``, ``entropy_loss`` and ``kl_loss`` are means over the
    share's response tokens, 0 where it has none, exactly rounded sums in float64, so their order does not matter. The
    update's loss is the sum of ``loss`` × ``num_tokens`` over all shares, divided by ``num_update_tokens``.
    ``effective_valid``: response tokens kept by rollout correction.
    """
    mask = micro_batch.response_mask.cpu()
    by_token = {name: term.detach().cpu().clone() for name, term in terms.items()}
    scalars = {
        "loss": mean(by_token["total_loss"], mask),
        "pg_loss": mean(by_token["pg_loss"], mask),
        "entropy_loss": mean(outputs["entropy"], mask),
    }
    with_reference: Content = {}
    if "kl_loss" in by_token:
        with_reference = {"kl_loss": mean(by_token["kl_loss"], mask), "elementwise_kl_loss": by_token["kl_loss"]}
    return {
        **scalars,
        "num_tokens": int(mask.sum()),
        "num_update_tokens": num_update_tokens,
        "log_probs": outputs["logprobs"],
        "old_log_probs": old_logprobs,
        "advantages": advantages,
        "prob_ratio": by_token["ratio"],
        "elementwise_loss": by_token["total_loss"],
        "elementwise_pg_loss": by_token["pg_loss"],
        "elementwise_entropy_loss": outputs["entropy"],
        **with_reference,
        "importance_weights": micro_batch.weights,
        "effective_valid": micro_batch.kept_mask.cpu(),
    }


def mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """The mean where the mask is True, whatever the order; 0 where it never is."""
    chosen = values[mask].double().tolist()
    return math.fsum(chosen) / len(chosen) if chosen else 0.0


Part = Mapping[str, torch.Tensor]
"""rows and positions, int64 ``[n]``, of n response tokens, and values of them by name."""


def response_part(micro_batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Part:
    """Returns values: ``[b, s]`` on the host, of each column's target."""
    mask = micro_batch.response_mask.cpu()
    places = {
        "rows": micro_batch.row_ids.cpu()[mask],
        "positions": micro_batch.positions.cpu()[mask] + 1,
    }
    return {**places, **{name: value[mask] for name, value in values.items()}}


class ResponseValues:
    """Collects parts; ``by_name`` then has one value for each of the batch's R response tokens, in its order."""

    def __init__(self, batch: RolloutBatch) -> None:
        self._starts = batch.row_offsets[:-1]
        self._order = batch.response_mask.long().cumsum(0) - 1
        self._num_responses = len(batch.rollout_logprobs)
        self._values: dict[str, torch.Tensor] = {}

    def add(self, parts: Sequence[Part]) -> None:
        """Parts of any rank; a token's value is the same in each of them."""
        for part in parts:
            places = self._order[self._starts[part["rows"]] + part["positions"]]
            for name, values in part.items():
                if name in ("rows", "positions"):
                    continue
                if name not in self._values:
                    self._values[name] = torch.full((self._num_responses,), torch.nan, dtype=values.dtype)
                self._values[name][places] = values

    def by_name(self) -> dict[str, torch.Tensor]:
        """``[R]`` by name; NaN where no part had the token."""
        return dict(self._values)


def old_logprobs_content(batch: RolloutBatch, old_logprobs: torch.Tensor) -> Content:
    """Returns the file of the trainer's log-probabilities before the step: ``[B, T]``, rows padded on the right with 0.

    old_logprobs: floating ``[R]``. ``positions`` are the tokens' own: column t has the value of token t.
    """
    inside = torch.arange(int(batch.lengths.max())) < batch.lengths[:, None]
    mask = torch.zeros(inside.shape, dtype=torch.bool)
    mask[inside] = batch.response_mask
    padded = torch.zeros(inside.shape, dtype=old_logprobs.dtype)
    padded[mask] = old_logprobs
    rows = torch.arange(len(batch))[:, None].expand(inside.shape)
    return {
        "old_log_probs": padded,
        "shape": list(padded.shape),
        "sample_ids": [str(identity) for identity in batch.identities],
        "sample_index": torch.where(inside, rows, -1),
        "positions": torch.arange(inside.shape[1]).expand(inside.shape),
        "response_mask": mask,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDump:
    """The tensors whose names, Megatron's or Hugging Face's, the pattern is found in."""

    pattern: str
    layout: ModelLayout

    def content(self, model: ObservedModel, kind: DumpKind) -> Content | None:
        """Lists this rank's parts of the chosen tensors; None where it has none.

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
    """Builds the dump of the tensors that ``debug.target_param_pattern`` matches; raises ``ConfigError`` if none."""
    model = config.model
    layout = ModelLayout(
        num_heads=model.num_attention_heads, num_query_groups=model.query_groups, is_gated=model.swiglu
    )
    shapes = parameter_shapes(model, vocab_size=vocab_size, sequence_length=config.sequence_length)
    check_pattern(config.debug.target_param_pattern, shapes, layout)
    return ParameterDump(pattern=config.debug.target_param_pattern, layout=layout)


def _values(model: ObservedModel, kind: DumpKind) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """Yields the parameters as the model computes with them, or its main gradients: with the distributed optimizer only
    the ranges reduced on this rank.
    """
    if kind == "param":
        yield from ((local.spec, local.parameter) for local in iterate_parameters(model))
    else:
        yield from ((piece.spec, piece.tensor) for piece in read_state(model, "gradient"))
