"""Attaches the instruments through the callbacks of a training loop: of Megatron-LM's newer ``pretrain``, which
megatron-core 0.19.2 does not have yet, and of Megatron-Bridge's.

Both take an object with methods named after their events, and look for nothing else; so this module imports neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mock_scheduler.config.attached import AttachedRun
from mock_scheduler.megatron.attached.attach import attach


class TrainingContext(Protocol):
    """The part of a callback's context that is read: the model chunks and the optimizer, built and loaded."""

    model: Any
    optimizer: Any


class AttachCallback:
    """Attaches at the beginning of the training: ``pretrain(..., callbacks=[AttachCallback()])``.

    The weights of a checkpoint are loaded by then. Everything else is as with ``megatron.attach``, whose arguments
    these are.
    """

    def __init__(
        self, *, vocab_size: int | None = None, prefix: str = "", run: AttachedRun | Path | str | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._prefix = prefix
        self._run = run

    def on_train_start(self, context: TrainingContext) -> None:
        """Attaches; the loop has set its chunks to training and begins its first step next."""
        attach(context.model, context.optimizer, vocab_size=self._vocab_size, prefix=self._prefix, run=self._run)
