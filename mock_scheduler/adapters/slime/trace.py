"""Attaches the instruments to the training of slime's family, by its own hook:

    --custom-megatron-before-train-step-hook-path mock_scheduler.adapters.slime.trace.before_train_step

Contract: the first call on a rank attaches to that rank's model and optimizer (``megatron.attach``); later ones find it
attached. Without a run file in the environment nothing is hooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mock_scheduler import megatron

_attached: dict[int, object] = {}


def before_train_step(
    args: Any,  # noqa: ANN401 - the framework's
    rollout_id: int,
    step_id: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,  # noqa: ANN401 - Megatron's
    opt_param_scheduler: object,
) -> None:
    """Attach before the first update; ``args`` says the size of the vocabulary without its padding.

    Every rank is asked at the same place: gradients are zeroed, and the step's forward passes are to come.
    """
    del rollout_id, step_id, opt_param_scheduler
    if id(optimizer) in _attached:
        return
    vocab_size = getattr(args, "vocab_size", None)
    # Kept with its optimizer, so that no other one gets its number.
    _attached[id(optimizer)] = (optimizer, megatron.attach(list(model), optimizer, vocab_size=vocab_size))
