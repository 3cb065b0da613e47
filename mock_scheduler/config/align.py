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

    ``activation``: largest ||a - b|| / ||a|| of anything in the forward pass, from inputs to losses.
    ``gradient``: the same of a main gradient, an activation's gradient, the gradients' norm and the optimizer's state.
    ``update``: largest ||d_a - d_b|| / ||d_a|| of the change d of a parameter by one update, beyond rounding.
    """

    metric: NonNegativeFloat | None = None
    """Largest |a - b| / max(|a|, |b|, metric_floor) of a logged metric."""
    metric_floor: NonNegativeFloat | None = None
    """``null`` is 0."""
    activation: NonNegativeFloat | None = None
    gradient: NonNegativeFloat | None = None
    update: NonNegativeFloat | None = None


class CandidateConfig(ConfigSection):
    """Holds one candidate of an alignment run, by its differences from the baseline.

    ``overrides``: of the configuration. ``entry``: the Python module that runs it in the place of the program's own
    (``None``: the baseline's), for a change of code: it puts another kernel in, say, and then calls the program's
    ``main``.
    ``python``: the interpreter of another environment, for a change of version; ``None`` is this one.
    ``exact``: whether it must equal the reference to the last bit, in its own order of sums where this is emulated;
    ``None``: exactly where its code is this one's and nothing but its layout differs, so nothing else may round.
    """

    name: CandidateName
    """The name of its folder."""
    overrides: list[str] = Field(default=[])
    entry: str | None = None
    python: str | None = None
    exact: bool | None = None


class MatrixConfig(ConfigSection):
    """Holds candidates as a product: every layout with every option.

    ``exclude``: globs of the names of candidates, ``{layout}`` or ``{layout}.{option}``.
    """

    layouts: list[str] = Field(default=[])
    """Layouts such as ``tp2-sp-pp2``; each is combined with every option."""
    options: dict[CandidateName, list[str]] = Field(default={})
    """Overrides by a name of your own; ``plain: []`` is the layout alone."""
    exclude: list[str] = Field(default=[])


class ProofsConfig(ConfigSection):
    """The proofs for which an alignment may spend runs; each is tried only where no stronger one has decided.

    ``emulate``: one run per order of sums: a reference in one process that adds in the order of the candidate's layout.
    ``false``: noise decides alone. ``equal_inputs``: up to four runs of one step for each candidate that may round
    elsewhere too and is not equal to a reference in its order: what it makes of equal inputs is judged by one kernel's
    rounding. ``false``: noise alone judges it. ``noise``: ``auto`` measures the noise of every tensor where a candidate
    is not proved by ``emulate``; ``always`` also where it is, so that its distance is shown beside measured bounds.
    ``num_perturbations``: perturbed baselines that measure the noise of every tensor; 0: bounds of theory, by which a
    difference is ``suspect`` and called uncalibrated. ``referee``: both sides again in float64: ``auto`` where the
    verdict is suspect, or diverged by noise alone. ``localise``: further runs that narrow a divergence down to step,
    tensor and module. ``consequence``: the effect of a difference on clipping, KL, advantages and the direction of the
    update.
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
    program's own. ``executor``: who carries the runs out.
    """

    # No run reads this section: it says how runs are made and judged.
    decides: ClassVar = Decides.LABEL

    output_dir: str | None = None
    """The folder of runs, recording, verdicts and page; ``--output-dir`` counts before it; ``null``:
    ``{output_dir}/align``.
    """
    entry: str | None = None
    baseline: list[str] = Field(default=[])
    """Overrides for the baseline, and so for every run."""
    candidates: list[CandidateConfig] = Field(default=[])
    """The changes to judge, as below."""
    matrix: MatrixConfig = MatrixConfig()
    tolerance: ToleranceConfig | None = None
    """Bounds that you state in place of measured ones; ``null``: none."""
    proofs: ProofsConfig = ProofsConfig()
    at_once: PositiveInt = 1
    """Runs that go at a time. On a machine whose cores one run fills, more take longer and give the same bits."""
    executor: ExecutorConfig = LocalExecutorConfig()

    @model_validator(mode="after")
    def _check_at_once(self) -> Self:
        if self.at_once != 1 and not isinstance(self.executor, LocalExecutorConfig):
            raise ValueError(f"at_once is {self.at_once}, and counts runs of this machine; write executor.max_jobs")
        return self
