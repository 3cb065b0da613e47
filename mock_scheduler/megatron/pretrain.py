"""Attaches the instruments to Megatron-LM's training loop in releases without callbacks.

``pretrain`` builds chunks and optimizer itself and gives them to nobody, so there is no line to attach behind. The
smallest place that has both is the function that it calls to build them. Written for megatron-core 0.19.2; it can go
when every supported release has callbacks (``mock_scheduler.megatron.callback``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mock_scheduler.config.attached import AttachedRun
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.rules.known_wrong import installed_megatron
from mock_scheduler.megatron.attached.attach import attach


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
        """Megatron's own answer: chunks, optimizer and scheduler of the learning rate."""
        from megatron.training import get_tokenizer  # not in every release

        chunks, optimizer, scheduler = self._setup(*arguments, **keywords)
        if optimizer is not None:  # none with --skip-train
            vocab_size = int(get_tokenizer().vocab_size)
            attach(chunks, optimizer, vocab_size=vocab_size, prefix=self._prefix, run=self._run)
        return chunks, optimizer, scheduler
