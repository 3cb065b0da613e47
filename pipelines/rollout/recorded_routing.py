"""Keeps the experts that the routers choose while the policy samples: ``actor_infer.record_routed_experts``.

Every rank of a replica records what its own routers chose, of its own layers and tokens; the leader gets all of it
after each pass, in the order of layers and tokens that no layout changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipelines.megatron.layers.routing import RoutingTable, empty_routing
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.cached_policy import ForwardPass


class RoutingRecorder:
    """The experts of the tokens of a block's rows; the leader alone keeps them."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._model = trainer.config.model
        self._runtime = trainer.runtime
        self._ledger = trainer.router_ledger
        self._of_pass: torch.Tensor | None = None
        self._parts: dict[int, list[torch.Tensor]] = {}

    def begin_block(self) -> None:
        """Forgets the rows of the block before."""
        self._parts = {}

    @contextmanager
    def reading(self, item: ForwardPass) -> Iterator[None]:
        """Records a pass that is made in the block. Every rank of the replica enters it with the same pass."""
        lengths = torch.tensor([len(tokens) for tokens in item.tokens])
        # A row's first new token is its number ``starts``, so the number of its token 0 may be negative.
        row_starts = lengths.cumsum(0) - lengths - torch.tensor(item.starts)
        table = RoutingTable.empty(self._model, row_starts.to(self._runtime.device), int(lengths.sum()))
        with self._ledger.using(table), table.doing("record"):
            yield
        group = self._runtime.replica_group
        if group is not None and group.size() > 1:
            # Where a rank has no choice to tell it has -1; where several do, they hold the same.
            dist.all_reduce(table.experts, op=dist.ReduceOp.MAX, group=group)
        self._of_pass = table.experts.cpu()

    def keep(self, rows: Sequence[int], item: ForwardPass) -> None:
        """Adds the last pass to these rows of the block. Leader only.

        Raises:
            RuntimeError: no router told its choice of some token.
        """
        assert self._of_pass is not None
        if int(self._of_pass.min()) < 0:
            raise RuntimeError("no router told the experts of some tokens, of which a pass was to record all")
        parts = self._of_pass.to(empty_routing(self._model).dtype).split([len(tokens) for tokens in item.tokens])
        for row, start, part in zip(rows, item.starts, parts, strict=True):
            self._parts[row] = [*self._parts.get(row, []), part] if start else [part]

    def of_row(self, row: int) -> torch.Tensor:
        """Returns the experts of the tokens that a row has read, ``[n, layers, topk]``."""
        whole = torch.cat(self._parts[row])
        self._parts[row] = [whole]
        return whole
