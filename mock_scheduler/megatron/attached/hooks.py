"""Hooks into a training: into the passes of its model chunks, with each one's tokens, and its optimizer's updates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from mock_scheduler.errors import TraceError


class PassListener(Protocol):
    """Gets told of forward passes."""

    def pass_begins(self, chunk: int, number: int, call: CallInputs) -> None:
        """A chunk begins its pass over the update's micro-batch ``number``."""

    def pass_ends(self, chunk: int, output: object) -> None:
        """The pass gave this output."""

    def bypass_begins(self) -> None:
        """A pass begins that no update trains on: of an evaluation, a generation, or of old log-probabilities."""

    def bypass_ends(self) -> None:
        """It has ended."""


class ForwardPasses:
    """Holds the hooks on this rank's chunks.

    A pass is counted where gradients are enabled and the chunk is in training mode. Each chunk computes an update's
    micro-batches in their order, under every schedule, so its n-th counted pass is micro-batch n. Recomputation calls
    layers, and never a chunk. The hooks are on the ``GPTModel`` itself: a call past its wrappers is seen as well.
    """

    def __init__(self, gpts: Sequence[GPTModel], listener: PassListener) -> None:
        self._listener = listener
        self._counts = [0] * len(gpts)
        self._is_counted = [False] * len(gpts)
        #: Since the training was attached.
        self.num_counted = 0
        self.num_bypasses = 0
        for chunk, gpt in enumerate(gpts):
            self._watch(chunk, gpt)

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns the counted passes of each chunk in the update under way."""
        return tuple(self._counts)

    def start_update(self) -> None:
        """Counts anew."""
        self._counts = [0] * len(self._counts)

    def _watch(self, chunk: int, gpt: GPTModel) -> None:
        reader = InputReader(gpt)

        def begin(module: torch.nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
            is_counted = self._is_counted[chunk] = torch.is_grad_enabled() and module.training
            if not is_counted:
                self.num_bypasses += 1
                self._listener.bypass_begins()
                return
            number = self._counts[chunk]
            self._counts[chunk] += 1
            self.num_counted += 1
            self._listener.pass_begins(chunk, number, reader.read(arguments, keywords))

        def end(module: torch.nn.Module, arguments: tuple[object, ...], output: object) -> None:
            if self._is_counted[chunk]:
                self._listener.pass_ends(chunk, output)
            else:
                self._listener.bypass_ends()

        # Last before the call and first behind it, so that no other hook is taken for the model's own computation.
        gpt.register_forward_pre_hook(begin, with_kwargs=True)
        gpt.register_forward_hook(end, prepend=True)


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
        """Returns the tensors with a value for each token, by their names in a trace."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What one call of ``MegatronOptimizer.step`` did.

    succeeded: whether it updated; it skips an update with gradients that are not finite. grad_norm: before clipping;
    ``None`` where Megatron computed none. learning_rate: of the first group of parameters; ``None`` on a rank without.
    """

    succeeded: bool
    grad_norm: float | None
    learning_rate: float | None


def watch_updates(
    optimizer: MegatronOptimizer, *, before: Callable[[], None], after: Callable[[UpdateResult], None]
) -> None:
    """Calls ``before`` and ``after`` around every ``optimizer.step`` of this object, for good.

    Args:
        optimizer: Megatron's, of any kind; of a ``ChainedOptimizer`` its own ``step`` counts.
        before: Gradients are reduced by then, and not yet clipped.
        after: Parameters are updated by then.
    """
    original = optimizer.step

    @functools.wraps(original)
    def step(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - whatever Megatron's own gives
        before()
        result = original(*arguments, **keywords)
        after(_read_result(result, optimizer))
        return result

    optimizer.step = step


def _read_result(result: Any, optimizer: MegatronOptimizer) -> UpdateResult:  # noqa: ANN401
    succeeded, grad_norm, _ = result
    groups = [] if optimizer.is_stub_optimizer else optimizer.param_groups
    return UpdateResult(
        succeeded=bool(succeeded),
        grad_norm=None if grad_norm is None else _number(grad_norm),
        learning_rate=float(groups[0]["lr"]) if groups else None,
    )


def _number(value: float | torch.Tensor) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def check_counts(gathered: Sequence[Mapping[str, Any]], step: int) -> None:
    """Refuses a replica whose chunks made other numbers of forward passes; replicas may have other numbers each.

    Raises:
        TraceError: on every rank alike.
    """
    by_replica: dict[int, set[int]] = {}
    for item in gathered:
        by_replica.setdefault(item["replica"], set()).update(item["passes"])
    if any(len(counts) > 1 for counts in by_replica.values()):
        by_rank = "; ".join(f"global rank {rank}: {_list_counts(item['passes'])}" for rank, item in enumerate(gathered))
        raise TraceError(
            f"step {step}: model chunks made other numbers of forward passes with gradients in one update: {by_rank}. "
            "A pass that no update trains on belongs under torch.no_grad() or in eval()"
        )


def _list_counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
