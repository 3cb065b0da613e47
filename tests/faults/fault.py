"""What a catalogued fault is: how it is put in, where it shows and where not, and what must be said of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from tests.faults.counting import Fired

Phase = Literal["data", "forward", "backward", "update"]
"""data: parameters as loaded, inputs, advantages. forward: activations and losses. backward: gradients and their norm.
update: moments, parameters and weights."""

Precision = Literal["float32", "bfloat16"]

#: In which every fault is run.
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

Injector = Callable[[Fired], AbstractContextManager[None]]
"""Puts the fault into the real training for a block, and counts each time that it did its harm, or would have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training: a model of ``cases.MODELS``, a layout as in ``benchmarks/layouts/cases.py``, names of its options.

    ``option``: names of ``cases.OPTIONS`` with ``+`` between them.
    """

    model: str = "dense"
    layout: str = "tp1"
    option: str = "plain"

    @property
    def label(self) -> str:
        """In one phrase."""
        parts = [self.model, self.layout, *([] if self.option == "plain" else self.option.split("+"))]
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the first divergence must be.

    phase: of the step. names: globs of canonical names, of which the first one named must match one. kind: a word that
    the explanation must have; each of ``a|b`` will do, and an empty one asks for nothing. update: of the step.
    is_loss_equal: whether the first update's loss is the clean run's to the last bit, so that no loss curve can show
    the fault at its beginning.
    """

    phase: Phase
    names: tuple[str, ...]
    kind: str = ""
    update: int = 0
    is_loss_equal: bool = False


def in_data(*names: str, kind: str = "") -> Expected:
    """Expects what is loaded or read to be wrong."""
    return Expected(phase="data", names=names, kind=kind)


def in_forward(*names: str, kind: str = "", update: int = 0) -> Expected:
    """Expects it in a forward pass; in a later one the first loss is still right."""
    return Expected(phase="forward", names=names, kind=kind, update=update, is_loss_equal=update > 0)


def in_backward(*names: str, kind: str = "", update: int = 0) -> Expected:
    """Expects it in a backward pass."""
    return Expected(phase="backward", names=names, kind=kind, update=update, is_loss_equal=True)


def in_update(*names: str, kind: str = "", update: int = 0) -> Expected:
    """Expects it in what the optimizer does."""
    return Expected(phase="update", names=names, kind=kind, update=update, is_loss_equal=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One entry of the catalogue.

    number: in the reference's list, or the name of a real bug of the library (``R1``); empty for one of our own.
    inject: ``None`` where the run's configuration is the fault, as of a real bug. shows: the run that it spoils.
    silent: one that it must not change in one bit. is_idle_where_silent: whether it has nothing to count there, as
    where no expert exists. precisions: in which it is a fault.
    """

    id: str
    number: str = ""
    description: str
    inject: Injector | None
    shows: Run
    silent: Run
    expected: Expected
    is_idle_where_silent: bool = False
    precisions: tuple[Precision, ...] = PRECISIONS
