"""The ``trace`` section names the training internals for a run to write; importing this imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeInt, PositiveInt, Steps

TraceKind = Literal[
    "initial",
    "input",
    "score",
    "advantage",
    "activation",
    "router",
    "logits",
    "output",
    "loss",
    "activation_gradient",
    "gradient",
    "gradient_norm",
    "optimizer",
    "parameter",
    "weight",
]
"""The kind of a traced tensor, in the order in which a step computes them; ``trace.kinds`` explains each."""

LedgerKind = Literal["random", "collective"]
"""A sequence of calls rather than a tensor: random draws, and collectives."""

#: In the order in which a step computes them.
TRACE_KINDS: tuple[TraceKind, ...] = get_args(TraceKind)
LEDGER_KINDS: tuple[LedgerKind, ...] = get_args(LedgerKind)

#: The kinds that an alignment judges; the default of ``trace.kinds``.
DEFAULT_KINDS: tuple[TraceKind, ...] = ("initial", "gradient", "parameter", "weight")

TraceLevel = Literal["off", "sketch", "full"]


def _parse_kinds(value: object) -> object:
    """``all`` is every kind of tensor and both ledgers."""
    return [*TRACE_KINDS, *LEDGER_KINDS] if value == "all" else value


class TraceConfig(ConfigSection):
    """The training internals to write to ``{output_dir}/trace``, and how much of each.

    ``level``: ``off``: nothing, at no cost. ``full``: whole tensors. ``sketch``: a few hundred bytes for each, enough
    for ``mock-scheduler compare`` to estimate how far two runs are apart.

    ``kinds``: names of ``TraceKind`` and ``LedgerKind``, or ``all``. ``patterns``: globs of canonical names, as
    ``decoder.layers.3.*``; a tensor is written where its name matches one of them and none of ``exclude``. Ledgers have
    no names and follow ``kinds`` alone.

    ``steps``: as in ``0-4, 7``; ``null`` is every step. Among them every ``dump_every_n_steps``-th step of the run is
    written. ``ranks``: the writing global ranks; ``null`` is all.

    ``sketch_buckets``: numbers in a sketch of one tensor; the error of its estimate falls with their square root.
    ``part_bytes``: at this size a rank's file of a step is ended, and another begun. ``operations``: write digests of
    every torch operation of a step, for ``mock-scheduler doctor``.
    """

    decides: ClassVar = Decides.NOTHING

    level: TraceLevel = "off"
    kinds: Annotated[list[TraceKind | LedgerKind], BeforeValidator(_parse_kinds)] = Field(default=[*DEFAULT_KINDS])
    patterns: list[str] = Field(default=["*"])
    exclude: list[str] = Field(default=[])
    steps: Steps | None = None
    dump_every_n_steps: PositiveInt = 1
    ranks: list[NonNegativeInt] | None = None
    sketch_buckets: Annotated[int, Field(ge=8, le=4096)] = 64
    part_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30
    operations: bool = False

    @model_validator(mode="after")
    def _check_lists(self) -> TraceConfig:
        for name, values in (("kinds", self.kinds), ("patterns", self.patterns), ("ranks", self.ranks)):
            if values is not None and not values:
                raise ValueError(f"{name} is empty, so nothing would be written; set level=off for that")
            doubled = sorted({str(value) for value in values or () if list(values or ()).count(value) > 1})
            if doubled:
                raise ValueError(f"{name} has {', '.join(doubled)} more than once")
        return self

    def is_due(self, step: int) -> bool:
        """Says whether anything is traced at a step."""
        if self.level == "off" or step % self.dump_every_n_steps:
            return False
        return self.steps is None or step in self.steps
