"""Training workers of frameworks around a Megatron training of a test's own: their attributes, methods and order.

Each stands for the class that its docstring names. They train; none of them knows of the instruments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from mock_scheduler.adapters.areal import trace as areal
from mock_scheduler.adapters.engines import EngineParts, with_trace
from mock_scheduler.adapters.nemo_rl import trace as nemo_rl
from mock_scheduler.adapters.roll import trace as roll
from mock_scheduler.adapters.skyrl import trace as skyrl

#: Makes the passes of micro-batches by Megatron's schedule.
Passes = Callable[[list[Any], Sequence[Any]], None]


def _zero(chunks: Sequence[Any], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


class SkyrlWorker:
    """SkyRL 0.4.0, ``MegatronPolicyWorkerBase``: gradients of several schedules are reduced in ``optim_step``."""

    def __init__(self, chunks: list[Any], optimizer: Any, passes: Passes) -> None:
        self.actor_module, self.optimizer = chunks, optimizer
        self._passes = passes
        self.forgets = False  # a fault: nothing is reduced
        self._num_tokens: Any = None
        get_model_config(chunks[0]).finalize_model_grads_func = self._defer

    def _defer(self, model: Any, num_tokens: Any = None, **_: Any) -> None:
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens

    def forward_backward(self, data: Sequence[Any]) -> None:
        self._passes(self.actor_module, data)

    def optim_step(self) -> None:
        num_tokens, self._num_tokens = self._num_tokens, None
        if not self.forgets:
            finalize_model_grads(self.actor_module, num_tokens)
        self.optimizer.step()
        _zero(self.actor_module, self.optimizer)

    def train(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            self.forward_backward([batch])
        self.optim_step()


class ModelList(list[Any]):
    """AReaL's list of chunks."""


class ArealEngine:
    """AReaL 1.0.4, ``MegatronPPOActor``."""

    def __init__(self, chunks: list[Any], optimizer: Any, passes: Passes) -> None:
        self.model, self.optimizer = ModelList(chunks), optimizer
        self._passes = passes

    def train_batch(self, input_: Sequence[Any], loss_fn: Any = None, loss_weight_fn: Any = None) -> None:
        _zero(self.model, self.optimizer)
        self._passes(list(self.model), input_)
        self.optimizer.step()

    def train(self, batches: Sequence[Any]) -> None:
        self.train_batch(batches)


class _RollStrategy:
    """ROLL 0.3.0, ``MegatronTrainStrategy``."""

    def __init__(self, chunks: list[Any], optimizer: Any, passes: Passes) -> None:
        self.models_wrapped, self.optimizer = chunks, optimizer
        self._passes = passes

    def train_step(self, batch: Sequence[Any], loss_func: Any) -> None:
        self._passes(self.models_wrapped, batch)
        self.optimizer.step()
        _zero(self.models_wrapped, self.optimizer)


class RollWorker:
    """ROLL 0.3.0, ``ActorWorker``: its strategy is made by ``initialize``."""

    strategy: Any = None

    def __init__(self, chunks: list[Any], optimizer: Any, passes: Passes) -> None:
        self._parts = chunks, optimizer, passes

    def initialize(self, pipeline_config: Any) -> None:
        self.strategy = _RollStrategy(*self._parts)

    initialize.marked = "one to all"  # type: ignore[attr-defined]  # as ROLL's decorator does

    def train_step(self, data: Sequence[Any]) -> None:
        self.strategy.train_step(batch=data, loss_func=None)

    def train(self, batches: Sequence[Any]) -> None:
        if self.strategy is None:
            self.initialize(None)
        self.train_step(batches)


class NemoRlWorker:
    """NeMo-RL 7ea279abf, ``MegatronPolicyWorkerImpl``: its model is one chunk, and no list."""

    def __init__(self, chunks: list[Any], optimizer: Any, passes: Passes) -> None:
        (self.model,), self.optimizer = chunks, optimizer
        self._passes = passes

    def train(self, data: Sequence[Any], loss_fn: Any = None, eval_mode: bool = False) -> None:
        _zero([self.model], self.optimizer)
        self._passes([self.model], data)
        self.optimizer.step()


_TRACED: dict[str, tuple[type, EngineParts]] = {
    "skyrl": (SkyrlWorker, skyrl.PARTS),
    "areal": (ArealEngine, areal.PARTS),
    "roll": (RollWorker, roll.PARTS),
    "nemo_rl": (NemoRlWorker, nemo_rl.PARTS),
}


def traced_worker(name: str) -> Any:
    """The class that an adapter makes of a framework's worker."""
    worker, parts = _TRACED[name]
    traced: Any = with_trace(worker, parts)
    return traced
