"""Records the experts that routers choose for each token, and has recorded ones chosen again (routing replay).

A router knows a token by its *place*: row + position · 2³², one int64, -1 for padding. Places travel as Megatron's
``padding_mask``, which goes with a micro-batch through tensor, sequence, pipeline, expert and context parallelism,
through packing, and into recomputation; so one table of a step serves every layout, and no pass waits for another.

The choice itself is Megatron's ``RouterReplay``: it replaces the indices of the highest scores and gathers the current
scores there, so weights and gradients are those of the present logits. Chosen experts are ordered by their present
scores, as a choice of the router's own is; a replay of its own choice therefore changes no bit, whatever order a
recording has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Column, TensorColumn, column_kind
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN, expert_dtype
from mock_scheduler.errors import BatchError
from pipelines.config.model import ModelConfig

_ROW_BITS = 32


def places_of(row_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Makes places of row ids, -1 for padding, and positions within rows, both int64."""
    return torch.where(row_ids < 0, -1, row_ids | (positions << _ROW_BITS))


def rows_of(places: torch.Tensor) -> torch.Tensor:
    """Reads the row ids of places, -1 for padding; a row id alone is a place of position 0."""
    return torch.where(places < 0, -1, places & (2**_ROW_BITS - 1))


def layers_with_experts(model: ModelConfig) -> list[int]:
    """Lists the numbers, from 0, of the layers that a table has, in its order."""
    return [layer for layer, has_experts in enumerate(model.moe_layers) if has_experts]


class RoutingTable:
    """The experts of each token of some rows in every layer, as far as this rank knows them.

    experts: ``[tokens, layers, topk]`` on the compute device, -1 or anything where ``is_known`` (bool ``[tokens]``) is
    False. The token at position p of row r is number ``row_starts[r] + p``. agreement: int64 ``[2]``, of the passes in
    ``comparing`` on this rank the replayed choices that the router would have made itself, and all replayed ones.
    """

    def __init__(
        self, model: ModelConfig, row_starts: torch.Tensor, experts: torch.Tensor, is_known: torch.Tensor
    ) -> None:
        self.experts = experts
        self.is_known = is_known
        self.action: Literal["record", "replay"] | None = None
        self.agreement = torch.zeros(2, dtype=torch.int64, device=experts.device)
        self._compares = False
        self._row_starts = row_starts
        self._index = {layer: index for index, layer in enumerate(layers_with_experts(model))}

    @classmethod
    def empty(cls, model: ModelConfig, row_starts: torch.Tensor, num_tokens: int) -> RoutingTable:
        """Makes a table to record into. row_starts: int64 ``[rows]``, on the compute device."""
        shape = (num_tokens, len(layers_with_experts(model)), model.moe_router_topk)
        device = row_starts.device
        experts = torch.full(shape, -1, dtype=torch.int32, device=device)
        return cls(model, row_starts, experts, torch.zeros(num_tokens, dtype=torch.bool, device=device))

    @classmethod
    def of_batch(cls, batch: RolloutBatch, model: ModelConfig, device: torch.device) -> RoutingTable:
        """Reads the routed experts of a batch.

        Raises:
            BatchError: it has none, or they are those of another model.
        """
        column = batch.extras.get(ROUTED_EXPERTS_COLUMN)
        _check_column(column, model)
        assert isinstance(column, TensorColumn)
        assert column.offsets is not None
        row_starts = batch.row_offsets[:-1]
        sizes = column.offsets.diff()
        numbers = torch.arange(len(column.values)) + torch.repeat_interleave(row_starts - column.offsets[:-1], sizes)
        experts = torch.zeros(len(batch.tokens), *column.values.shape[1:], dtype=column.values.dtype)
        experts[numbers] = column.values
        is_known = torch.zeros(len(batch.tokens), dtype=torch.bool)
        is_known[numbers] = True
        return cls(model, row_starts.to(device), experts.to(device), is_known.to(device))

    @contextmanager
    def doing(self, action: Literal["record", "replay"] | None) -> Iterator[None]:
        """Records, replays or does nothing in the block."""
        before, self.action = self.action, action
        try:
            yield
        finally:
            self.action = before

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compares replayed choices with the routers' own in the block."""
        self._compares = True
        try:
            yield
        finally:
            self._compares = False

    def choose(
        self, replay: RouterReplay, layer: int, places: torch.Tensor, scores: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses ``topk`` experts of each token by scores ``[n, E]``, or as recorded; returns scores and indices.

        layer: its number in the model, from 0. places: int64 ``[n]``.
        """
        if self.action == "replay":
            own = scores.topk(topk, dim=1).indices
            chosen = self.replayed(layer, places, own)
            if self._compares:
                is_same = (own.sort(dim=1).values == chosen.sort(dim=1).values).all(dim=1)
                is_known = self._find(places)[1]
                self.agreement += torch.stack(((is_same & is_known).sum(), is_known.sum()))
            order = scores.gather(1, chosen).argsort(dim=1, descending=True, stable=True)
            replay.target_topk_idx = chosen.gather(1, order)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        elif self.action == "record":
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        values, indices = replay.get_replay_topk(scores, topk, default_compute_topk=choose_highest)
        if self.action == "record":
            self._write(layer, places, replay.get_recorded_indices())
        replay.clear_indices()
        replay.clear_router_replay_action()
        return values, indices

    def replayed(self, layer: int, places: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Puts recorded experts in the place of a router's own ``[n, topk]``, where a token's are known."""
        if self.action != "replay":
            return own
        numbers, is_known = self._find(places)
        return torch.where(is_known.unsqueeze(1), self.experts[numbers, self._index[layer]].long(), own)

    def _find(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens' numbers, 0 for padding, and whether their experts are known."""
        is_real = places >= 0
        numbers = torch.where(is_real, self._numbers(places), 0)
        return numbers, is_real & self.is_known[numbers]

    def _write(self, layer: int, places: torch.Tensor, indices: torch.Tensor | None) -> None:
        assert indices is not None
        is_real = places >= 0
        numbers = self._numbers(places[is_real])
        self.experts[numbers, self._index[layer]] = indices[is_real].to(self.experts.dtype)
        self.is_known[numbers] = True

    def _numbers(self, places: torch.Tensor) -> torch.Tensor:
        return self._row_starts[rows_of(places).clamp(min=0)] + (places >> _ROW_BITS)


def choose_highest(scores: torch.Tensor, topk: int, **unused: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the highest scores of each token, ``[n, topk]``, and their indices."""
    values, indices = scores.topk(topk, dim=1)
    return values, indices


def _check_column(column: Column | None, model: ModelConfig) -> None:
    shape = (len(layers_with_experts(model)), model.moe_router_topk)
    advice = (
        "record rollouts of this model with actor_infer.record_routed_experts=true, or set model.moe_router_replay to "
        "record or off"
    )
    expected = f"the model has {shape[0]} layers with experts and chooses {shape[1]} of {model.num_moe_experts}"
    if not isinstance(column, TensorColumn) or column.offsets is None or tuple(column.values.shape[1:]) != shape:
        found = "none" if column is None else column_kind(column)
        raise BatchError(
            f"model.moe_router_replay replay: the batch's {ROUTED_EXPERTS_COLUMN} are {found}, and {expected}: {advice}"
        )
    lowest, highest = (int(bound) for bound in column.values.aminmax()) if len(column.values) else (0, 0)
    if lowest < 0 or highest >= (model.num_moe_experts or 0):
        raise BatchError(
            f"model.moe_router_replay replay: the batch's {ROUTED_EXPERTS_COLUMN} go from {lowest} to {highest}, and "
            f"{expected}: {advice}"
        )


def empty_routing(model: ModelConfig) -> torch.Tensor:
    """Makes the routing of no tokens, in the smallest dtype that holds the model's experts."""
    num_layers, dtype = len(layers_with_experts(model)), expert_dtype(model.num_moe_experts or 1)
    return torch.empty(0, num_layers, model.moe_router_topk, dtype=dtype)
