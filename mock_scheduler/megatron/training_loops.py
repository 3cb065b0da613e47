"""Attaches the instruments to a training loop of others, which builds chunks and optimizer and gives them to nobody.

Through callbacks: those of Megatron-LM's newer ``pretrain``, which megatron-core 0.19.2 does not have yet, and of
Megatron-Bridge's. Both take an object with methods named after their events, and look for nothing else; so neither is
imported.

Without callbacks: the smallest place that has both is the function that ``pretrain`` calls to build them. Written for
megatron-core 0.19.2; it can go when every supported release has callbacks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.rules.known_wrong import installed_megatron
from mock_scheduler.megatron.attached import NOT_ATTACHED, TrainingHandle
from mock_scheduler.megatron.attached.attach import attach


class TrainingContext(Protocol):
    """The part of a callback's context that is read: the model chunks and the optimizer, built and loaded."""

    model: Any
    optimizer: Any


class AttachCallback:
    """Attaches at the beginning of the training, and ends with it: ``pretrain(..., callbacks=[AttachCallback()])``.

    The weights of a checkpoint are loaded by then. Each step of the loop is a step of the run. Everything else is as
    with ``megatron.attach``, whose arguments these are; ``vocab_size`` ``None``: what the loop says of it.
    """

    def __init__(
        self, *, vocab_size: int | None = None, prefix: str = "", run: AttachedRun | Path | str | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._prefix = prefix
        self._run = run
        self._handle: TrainingHandle = NOT_ATTACHED
        self._step: AbstractContextManager[None] = nullcontext()

    def on_train_start(self, context: TrainingContext) -> None:
        """Attaches; the loop has set its chunks to training and begins its first step next."""
        vocab_size = _read_vocab_size(context) if self._vocab_size is None else self._vocab_size
        self._handle = attach(
            context.model, context.optimizer, vocab_size=vocab_size, prefix=self._prefix, run=self._run
        )

    def on_train_step_start(self, context: TrainingContext) -> None:
        """Begins a step: all that the loop computes until the end of it belongs to it."""
        self._step = self._handle.step()
        self._step.__enter__()

    def on_train_step_end(self, context: TrainingContext) -> None:
        """Ends it; behind the last one that the run file asks for, the process ends."""
        step, self._step = self._step, nullcontext()
        step.__exit__(None, None, None)

    def on_train_end(self, context: TrainingContext) -> None:
        """Leaves the run's files: a loop may exit without Python's own end."""
        self._handle.end()


def _read_vocab_size(context: TrainingContext) -> int | None:
    """Reads the size of the vocabulary without padding; ``None`` where no loop says it."""
    if hasattr(context, "state"):  # Megatron-Bridge's, which has its whole configuration there
        return _whole(context.state.cfg.model.vocab_size)
    # Megatron-LM's loop has its tokenizer there, and its context has nothing of it.
    loop = sys.modules.get("megatron.training.global_vars")
    try:
        return None if loop is None else _whole(loop.get_tokenizer().vocab_size)
    except AssertionError:  # a loop of somebody's own: Megatron's is not initialized
        return None


def _whole(value: Any) -> int | None:  # noqa: ANN401 - the loop's
    return None if value is None else int(value)


def attach_to_pretrain(*, prefix: str = "", run: AttachedRun | Path | str | None = None) -> None:
    """Lets ``megatron.training.pretrain`` attach the instruments, once it has built and loaded model and optimizer.

    Called before ``pretrain``, on every rank; it does not communicate. The size of the vocabulary is the tokenizer's,
    since Megatron pads the model's by a multiple of tp.

    Args:
        prefix: as for ``megatron.attach``.
        run: as for ``megatron.attach``.

    Raises:
        ConfigError: the installed Megatron has no training loop, or it is attached to already.
    """
    if find_spec("megatron.training") is None:
        raise ConfigError(
            f"megatron.attach_to_pretrain needs megatron.training, and megatron-core {installed_megatron()} has none: "
            "install megatron-core>=0.19.2 (Python 3.12), or Megatron-LM. A loop of your own calls "
            "megatron.attach(model_chunks, optimizer) instead"
        )
    # Not every release has it.
    from megatron.training import training

    if isinstance(training.setup_model_and_optimizer, _AttachingSetup):
        raise ConfigError("megatron.attach_to_pretrain was called twice: call it once, before pretrain")
    training.setup_model_and_optimizer = _AttachingSetup(training.setup_model_and_optimizer, prefix=prefix, run=run)


class _AttachingSetup:
    """Builds model and optimizer as Megatron does, and attaches to them."""

    def __init__(
        self, setup: Callable[..., tuple[Any, Any, Any]], *, prefix: str, run: AttachedRun | Path | str | None
    ) -> None:
        self._setup = setup
        self._prefix = prefix
        self._run = run
        functools.update_wrapper(self, setup)

    def __call__(self, *arguments: Any, **keywords: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - Megatron's own
        """Returns Megatron's own answer: chunks, optimizer and scheduler of the learning rate."""
        from megatron.training import get_tokenizer  # not in every release

        chunks, optimizer, scheduler = self._setup(*arguments, **keywords)
        if optimizer is not None:  # none with --skip-train
            vocab_size = int(get_tokenizer().vocab_size)
            attach(chunks, optimizer, vocab_size=vocab_size, prefix=self._prefix, run=self._run)
        return chunks, optimizer, scheduler
