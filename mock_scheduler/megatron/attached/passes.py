"""Counts the forward passes of each model chunk, and tells those that are trained on from all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from mock_scheduler.megatron.attached.call_inputs import CallInputs, InputReader


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
    """The hooks on this rank's chunks.

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
        """The counted passes of each chunk in the update under way."""
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
