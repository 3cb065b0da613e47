"""A run becomes part of a proof by the order in which it adds, by perturbed weights, or by grafted tensors.

Contract: importing this imports no torch. All three are off by default, and an alignment sets them itself.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeInt
from mock_scheduler.config.layout import ParallelConfig

#: u by precision: half the distance from 1 to the next larger number.
UNIT_ROUNDOFFS = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


class OrderConfig(ConfigSection):
    """The order in which sums are made.

    ``emulate``: one process follows this layout's order in matrix products, reductions and accumulators; the
    computation stays the reference's own. ``ordered_reductions``: reductions over more than two ranks add the ranks'
    parts in the order of the ranks, by a gather; a library's own order depends on sizes and topology.
    """

    decides: ClassVar = Decides.ORDER

    emulate: ParallelConfig | None = None
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


class GraftConfig(ConfigSection):
    """A reference's tensors are put into a run, to tell the cause of a difference from a module that passes it on.

    ``trace_dir``: a trace of level ``full`` with these tensors; ``None`` grafts nothing. ``names``: canonical names of
    module outputs. ``kind``: ``activation`` (in the forward pass) or ``activation_gradient`` (in the backward pass).
    ``step``, ``update``: the one update with grafts.
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
