"""Has the ``align`` section: candidates, proofs and bounds of an alignment; importing this imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeFloat, NonNegativeInt, PositiveInt
from mock_scheduler.config.executor import ExecutorConfig, LocalExecutorConfig

CANDIDATE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""A candidate's name is that of its folder."""
CandidateName = Annotated[str, Field(pattern=CANDIDATE_NAME, max_length=128)]


class ToleranceConfig(ConfigSection):
    """Bounds by a user: how far a candidate may be from the baseline and still be called ``rounding``.

    A quantity without a stated bound is held to the measured noise, or to theory where no noise was measured.

    ``metric``: largest |a - b| / max(|a|, |b|, metric_floor) of a logged metric; ``metric_floor``: ``None`` is 0.
    ``activation``: largest ||a - b|| / ||a|| of anything in the forward pass, from inputs to losses.
    ``gradient``: the same of a main gradient, an activation's gradient, the gradients' norm and the optimizer's state.
    ``update``: largest ||d_a - d_b|| / ||d_a|| of the change d of a parameter by one update, beyond rounding.
    """

    metric: NonNegativeFloat | None = None
    metric_floor: NonNegativeFloat | None = None
    activation: NonNegativeFloat | None = None
    gradient: NonNegativeFloat | None = None
    update: NonNegativeFloat | None = None


class CandidateConfig(ConfigSection):
    """Holds one candidate of an alignment run, by its differences from the baseline.

    ``overrides``: configuration overrides. ``entry``: the Python module that runs it in the place of the program's own
    (``None``: the baseline's), for a change of code: it puts another kernel in, say, and then calls the program's
    ``main``.
    ``python``: the interpreter of another environment, for a change of version; ``None`` is this one.
    ``exact``: whether it must equal the reference to the last bit, in its own order of sums where this is emulated;
    ``None``: exactly where its code is this one's and nothing but its layout differs, so nothing else may round.
    """

    name: CandidateName
    overrides: list[str] = Field(default=[])
    entry: str | None = None
    python: str | None = None
    exact: bool | None = None


class MatrixConfig(ConfigSection):
    """Holds candidates as a product: every layout with every option.

    ``layouts``: as ``tp2-sp-pp2``; ``options``: overrides by a name of one's own, ``plain`` being none.
    ``exclude``: globs of the names of candidates, ``{layout}`` or ``{layout}.{option}``.
    """

    layouts: list[str] = Field(default=[])
    options: dict[CandidateName, list[str]] = Field(default={})
    exclude: list[str] = Field(default=[])


class ProofsConfig(ConfigSection):
    """The proofs for which an alignment may spend runs; each is tried only where no stronger one has decided.

    ``emulate``: a reference in one process, adding in the candidate's order. ``equal_inputs``: of a candidate that may
    round elsewhere too, further runs of one step, which judge its first differences from a reference in its order by
    one kernel's rounding. ``noise``: ``auto`` measures the noise of every tensor where a candidate is not proved by
    ``emulate``, ``always`` for every candidate without the baseline's bits. ``num_perturbations``: runs with weights
    perturbed by one unit roundoff, to measure it; 0: none. ``referee``: both sides again in float64, ``auto`` where the
    verdict is suspect or diverged. ``localise``: further runs to narrow a divergence down to step, tensor and module.
    ``consequence``: the effect of a difference on clipping, KL and update.
    """

    emulate: bool = True
    equal_inputs: bool = True
    noise: Literal["auto", "always"] = "auto"
    num_perturbations: NonNegativeInt = 5
    referee: Literal["auto", "always", "never"] = "auto"
    localise: bool = True
    consequence: bool = True


class AlignConfig(ConfigSection):
    """``mock-scheduler align``: the overrides of the baseline and of each candidate, and how they are judged.

    ``entry``: the Python module that runs the baseline, and every candidate without one of its own; ``None``: the
    program's own. ``tolerance``: the user's bounds in the place of measured noise. ``at_once``: how many runs may go
    at a time on this machine. ``executor``: who carries them out.
    """

    # No run reads this section: it says how runs are made and judged.
    decides: ClassVar = Decides.LABEL

    output_dir: str | None = None
    entry: str | None = None
    baseline: list[str] = Field(default=[])
    candidates: list[CandidateConfig] = Field(default=[])
    matrix: MatrixConfig = MatrixConfig()
    tolerance: ToleranceConfig | None = None
    proofs: ProofsConfig = ProofsConfig()
    at_once: PositiveInt = 1
    executor: ExecutorConfig = LocalExecutorConfig()

    @model_validator(mode="after")
    def _check_at_once(self) -> Self:
        if self.at_once != 1 and not isinstance(self.executor, LocalExecutorConfig):
            raise ValueError(f"at_once is {self.at_once}, and counts runs of this machine; write executor.max_jobs")
        return self
