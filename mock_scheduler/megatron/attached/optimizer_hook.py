"""Calls back around every call of an optimizer's ``step``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer


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
