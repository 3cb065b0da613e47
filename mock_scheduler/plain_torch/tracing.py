"""Writes what a training in plain torch does to its weights, step by step: ``trace_training``.

    tracing = trace_training(model, optimizer, trace_dir="traces/a")

Contract: the model is observed at ``optimizer.step``, by torch's own hooks: gradients as the optimizer gets them, after
the reduction over ranks and after clipping, then parameters and moments as it leaves them. ``gradients_are_ready``
shows them earlier, where a training can say when. Every rank writes what it holds, so replicas can be compared; nothing
communicates. A step holds one update; its number counts updates, from ``first_step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.plain_torch.state import StateKind, read_state
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry, TraceSink
from mock_scheduler.trace.selection import TraceSelection, describe_unmatched, open_sink
from mock_scheduler.trace.shards import whole

#: Outputs of modules, tokens and losses are not seen at the optimizer.
KINDS = ("initial", "gradient", "gradient_norm", "parameter", "optimizer")


def trace_training(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    trace_dir: str | Path,
    trace: TraceConfig | Mapping[str, Any] | None = None,
    first_step: int = 0,
) -> TorchTracing:
    """Trace a training from its next update on; ``close`` ends it. ``mock-scheduler compare`` takes two such folders.

    ``trace``: as the section ``trace`` of a configuration; by default whole tensors of initial parameters, gradients,
    parameters and the optimizer's state, at every step.

    Raises:
        ConfigError: ``trace`` asks for what is not seen at an optimizer.
        TraceError: a parameter's place in the whole model cannot be told; or a step is there already.
    """
    if trace is None:
        trace = {"level": "full", "kinds": ["initial", "gradient", "parameter", "optimizer"]}
    config = trace if isinstance(trace, TraceConfig) else TraceConfig.model_validate(dict(trace))
    beyond = [kind for kind in config.kinds if kind not in KINDS]
    if beyond:
        raise ConfigError(
            f"trace.kinds: {', '.join(beyond)} cannot be seen at an optimizer; known are {', '.join(KINDS)}"
        )
    return TorchTracing(model, optimizer, config, Path(trace_dir), first_step=first_step)


class TorchTracing:
    """One rank's trace of a training; ``trace_training`` makes it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TraceConfig,
        trace_dir: Path,
        *,
        first_step: int,
    ) -> None:
        self._model = model
        self._optimizer = unwrap_optimizer(optimizer)
        self._config = config
        self._trace_dir = trace_dir
        self._step = first_step
        self._selection = TraceSelection(config)
        self._rank, self._world_size = _process()
        self._sink: TraceSink | None = None
        self._has_gradients = self._are_patterns_checked = False
        self._handles = [
            self._optimizer.register_step_pre_hook(lambda *_call: self.gradients_are_ready()),
            self._optimizer.register_step_post_hook(lambda *_call: self._updated()),
        ]
        self._begin()

    def gradients_are_ready(self, grad_norm: float | None = None) -> None:
        """Show the gradients of the coming update as they are now; a second call for it does nothing."""
        if self._sink is None or self._has_gradients:
            return
        self._has_gradients = True
        self._add("gradient")
        if grad_norm is not None and self._selection.wants("gradient_norm", "grad_norm"):
            entry = TraceEntry(
                update=0,
                kind="gradient_norm",
                spec=whole("grad_norm", ()),
                tensor=torch.tensor(grad_norm, dtype=torch.float64),
            )
            self._sink.add(entry)

    def close(self) -> None:
        """End the trace: the step that was begun is left out."""
        for handle in self._handles:
            handle.remove()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abandon()

    def _begin(self) -> None:
        """Open the next step, where it is due, with the parameters before its update."""
        if not self._config.is_due(self._step) or not self._selection.writes(self._rank):
            return
        self._sink = open_sink(
            self._config,
            self._trace_dir,
            step=self._step,
            place=RankPlace(global_rank=self._rank, coordinates={"dp": self._rank}),
            world_size=self._world_size,
        )
        self._add("initial")

    def _updated(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._sink = sink
            self._add("parameter")
            self._add("optimizer")
            self._sink = None
            self._check_patterns(sink)
            ranks = range(self._world_size) if self._config.ranks is None else self._config.ranks
            sink.close(
                StepFooter(
                    ranks=tuple(ranks),
                    kinds=tuple(self._config.kinds),
                    patterns=tuple(self._config.patterns),
                    exclude=tuple(self._config.exclude),
                )
            )
        self._step += 1
        self._has_gradients = False
        self._begin()

    def _add(self, kind: StateKind) -> None:
        assert self._sink is not None  # asked for while a step is open
        if not self._selection.wants_kind(kind):
            return
        for spec, tensor in read_state(self._model, self._optimizer, kind):
            if self._selection.wants(kind, spec.name):
                self._sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=tensor))

    def _check_patterns(self, sink: TraceSink) -> None:
        """Refuse globs without a match in the first step: a name that was misspelt would look like an equal tensor."""
        if self._are_patterns_checked:
            return
        self._are_patterns_checked = True
        problem = describe_unmatched(self._selection.patterns, self._selection.names, matched=self._selection.matched)
        if problem:
            sink.abandon()
            raise TraceError(problem)


def unwrap_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return torch's own optimizer within wrappers, as accelerate's ``AcceleratedOptimizer``."""
    inner: Any = optimizer
    while not type(inner).__module__.startswith("torch.") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer is a {type(inner).__name__}; expected one of torch.optim")
    return inner


def _process() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
