"""A run's instruments: the trace of its internals, the order in which it adds, perturbed weights and grafted tensors.

Contract: importing this imports no torch. All are off by default; an alignment sets the last three itself, to make a
run part of a proof.

``AttachedRun`` is the file that ``MOCK_SCHEDULER_RUN`` names: what ``megatron.attach`` is to do in one run.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeInt, PositiveInt, Steps
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.config.rollout_mock import RolloutMockConfig

TraceKind = Literal[
    "initial",
    "input",
    "score",
    "advantage",
    "recomputed",
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
"""The kind of a traced tensor, in the order in which a step computes them; ``trace.entries.PHASES`` explains each."""

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
    """Holds the training internals to write to ``{output_dir}/trace``, and how much of each.

    ``kinds``: names of ``TraceKind`` and ``LedgerKind``, or ``all``. ``patterns``: globs of canonical names, as
    ``decoder.layers.3.*``; a tensor is written where its name matches one of them and none of ``exclude``. Ledgers have
    no names and follow ``kinds`` alone.

    ``steps``: as in ``0-4, 7``; ``null`` is every step. Among them every ``dump_every_n_steps``-th step of the run is
    written. ``ranks``: the writing global ranks; ``null`` is all. Tensors of others are missing from the trace.

    ``sketch_buckets``: numbers in a sketch of one tensor; the error of its estimate falls with their square root.
    ``part_bytes``: at this size a rank's file of a step is ended, and another begun; at most two are in memory.
    ``operations``: write digests of every torch operation of a step, for ``mock-scheduler doctor``.
    """

    decides: ClassVar = Decides.NOTHING

    level: TraceLevel = "off"
    """``off``: nothing, at no cost. ``full``: whole tensors. ``sketch``: a few hundred bytes for each, enough for
    ``mock-scheduler compare`` to estimate how far two runs are apart.
    """
    kinds: Annotated[list[TraceKind | LedgerKind], BeforeValidator(_parse_kinds)] = Field(default=[*DEFAULT_KINDS])
    patterns: list[str] = Field(default=["*"])
    exclude: list[str] = Field(default=[])
    """Globs of names that are left out."""
    steps: Steps | None = None
    dump_every_n_steps: PositiveInt = 1
    """Of the chosen steps, those divisible by it."""
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


#: u by precision: half the distance from 1 to the next larger number.
UNIT_ROUNDOFFS = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def coarser_precision(one: str, other: str) -> str:
    """Gives the precision that rounds more."""
    return max(one, other, key=lambda name: UNIT_ROUNDOFFS[name])


class OrderConfig(ConfigSection):
    """The order in which sums are made.

    ``ordered_reductions``: reductions over more than two ranks add the ranks'
    parts in the order of the ranks, by a gather; a library's own order depends on sizes and topology. Slower.
    """

    decides: ClassVar = Decides.ORDER

    emulate: ParallelConfig | None = None
    """A layout, in the keys of ``parallel``, whose order of sums one process follows in its matrix products, reductions
    and accumulators; ``null``: none.
    """
    ordered_reductions: bool = False


class PerturbationConfig(ConfigSection):
    """Weights moved by about one rounding, to measure how far so small a difference grows.

    Every weight w at the start of a run, initial or of its checkpoint, is w · (1 + unit_roundoffs · u · ξ), with
    ξ ~ N(0, 1) drawn by ``seed`` and the canonical name, so it is the same in every layout; u is 2^-24 in float32,
    2^-8 in bfloat16, 2^-53 in float64. The output of the embedding is moved likewise. ``seed``: ``None`` perturbs
    nothing.
    """

    decides: ClassVar = Decides.BITS

    seed: NonNegativeInt | None = None
    unit_roundoffs: float = Field(default=1.0, gt=0.0)
    """A multiple of u in place of u."""


class GraftConfig(ConfigSection):
    """A reference's tensors are put into a run, to tell the cause of a difference from a module that passes it on.

    ``trace_dir``: a trace of level ``full`` with these tensors; ``None`` grafts nothing. ``names``: canonical names of
    module outputs, of kinds ``activation``, ``router`` and ``logits``. ``kind``: ``activation`` (in the forward pass)
    or ``activation_gradient`` (in the backward pass). ``step``, ``update``: the one update with grafts.
    """

    # A grafted tensor is the same mathematics, computed elsewhere.
    decides: ClassVar = Decides.BITS

    trace_dir: Annotated[str | None, Decides.BITS | Decides.LABEL] = None
    kind: Literal["activation", "activation_gradient"] = "activation"
    names: list[str] = Field(default=[])
    step: NonNegativeInt = 0
    update: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check_names(self) -> GraftConfig:
        if (self.trace_dir is None) != (not self.names):
            raise ValueError("trace_dir and names belong together: give both, or neither")
        return self


RUN_FILE_VARIABLE = "MOCK_SCHEDULER_RUN"


class AttachedRun(ConfigSection):
    """One run of a training that the instruments are attached to.

    ``output_dir``: where its files go. ``parallel``: the layout that was asked for; attach refuses another one.
    ``None``: whatever it finds. ``begins_at``: the number of the training's first step, where it resumes a checkpoint.
    ``first_step``, ``last_step``: steps to observe, the last one included; behind it the run ends itself.
    ``None``: it ends by itself. ``initial_state``: a trace of level ``full`` whose initial parameters and optimizer
    state are put in their place. ``vocab_size``: without padding; ``None`` is the model's own.
    ``pad_token_id``: cut from the ends of rows before they are told apart. ``rollout_mock``: how the training's proxy
    records or replays rollouts; ``None`` for a training without one.
    """

    decides: ClassVar = Decides.LABEL

    format: Literal[1] = 1
    exp_name: str = "attached"
    output_dir: str
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    parallel: ParallelConfig | None = None
    system_envs: dict[str, str] = Field(default={})
    begins_at: NonNegativeInt = 0
    first_step: NonNegativeInt = 0
    last_step: NonNegativeInt | None = None
    trace: TraceConfig = TraceConfig()
    perturbation: PerturbationConfig = PerturbationConfig()
    graft: GraftConfig = GraftConfig()
    order: OrderConfig = OrderConfig()
    initial_state: Annotated[str | None, Decides.BITS | Decides.LABEL] = None
    vocab_size: int | None = None
    pad_token_id: int | None = None
    rollout_mock: Annotated[RolloutMockConfig | None, Decides.NOTHING] = None

    def observes(self, step: int) -> bool:
        """Says whether a step is among the observed ones."""
        return step >= self.first_step and (self.last_step is None or step <= self.last_step)
