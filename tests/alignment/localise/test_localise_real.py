"""Localisation of two planted faults through real runs under tp 2, up to the sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.alignment.localise.localise import localise
from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, Bounds, StatedBounds
from mock_scheduler.comparison.findings import Finding, OnlyIn
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.launch.warm_start import WarmStarts
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.wording.localisation import describe_localisation
from pipelines.config.loading import build_loader
from pipelines.program import PROGRAM
from tests.alignment.output_scaled_on_one_rank import FAULTY
from tests.pipelines.tiny_runs import ROOT, write_tiny_config

pytestmark = [pytest.mark.all, pytest.mark.timeout(1500)]

#: Forks the ranks of all runs.
WARM = WarmStarts()

#: Far above what tp 2 rounds in float32, far below the faults.
BOUNDS: Bounds = StatedBounds(
    tolerance=ToleranceConfig(metric=1e-3, activation=1e-4, gradient=1e-3, update=5e-2), otherwise=UNBOUNDED
)
NORM = "decoder.layers.0.input_layernorm.weight"


class Bench:
    """Runs of one configuration on one recording; ``made``: names of those that were carried out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configs = write_tiny_config(folder)
        self.made: list[str] = []
        self._load = build_loader("tiny", self.configs)

    def plan(self, name: str, *overrides: str, entry: str = "pipelines.agentic", mode: str = "mock") -> PlannedRun:
        """A run as an alignment plans it."""
        complete = (
            *("rollout_mock.enable=true", "rollout_mock.on_mismatch=error", "rollout_mock.missing_step=error"),
            *(f"rollout_mock.mode={mode}", quote_override("rollout_mock.dump_dir", str(self.folder / "recording"))),
            *("trace.level=full", quote_override("output_dir", str(self.folder / name)), *overrides),
        )
        return PlannedRun(
            program=PROGRAM,
            name=name,
            entry=entry,
            own_overrides=overrides,
            overrides=complete,
            config=self._load(complete),
            output_dir=self.folder / name,
        )

    def run(self, planned: PlannedRun, overrides: Sequence[str], name: str) -> Path:
        """As ``MakeRun`` says."""
        output_dir = self.folder / name
        complete = (*planned.overrides, *overrides, quote_override("output_dir", str(output_dir)))
        planned = replace(planned, overrides=complete, config=self._load(complete), output_dir=output_dir)
        self.carry_out(planned)
        self.made.append(name)
        return output_dir

    def carry_out(self, planned: PlannedRun) -> None:
        """Start its processes and wait for them."""
        plan = plan_launch(
            planned.config,
            PROGRAM.arguments(
                planned.entry,
                ConfigSource(config_name="tiny", config_path=str(self.configs), overrides=planned.overrides),
            ),
        )
        plan = replace(plan, preload=PROGRAM.preload)
        exit_code = run_plan(plan, log_path=planned.log_path, cwd=ROOT, warm=WARM)
        assert exit_code == 0, planned.log_path.read_text(encoding="utf-8")[-4000:]


def first_at(step: int) -> Divergence:
    finding = Finding(kind="gradient", step=step, update=0, name="w", fact=OnlyIn(side="baseline"))
    return Divergence(step=step, update=0, kind="gradient", name="w", evidence=finding)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """With the recording that all runs replay."""
    bench = Bench(tmp_path_factory.mktemp("localise"))
    bench.carry_out(bench.plan("baseline", mode="dump"))
    return bench


def test_a_gradient_that_is_not_reduced_is_named_with_its_reason(bench: Bench) -> None:
    candidate = bench.plan(
        "norms",
        *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
        entry="tests.faults.norm_gradients_not_reduced",
    )
    found = localise(bench.plan("baseline"), candidate, first=None, run=bench.run, bounds=BOUNDS)
    print(found)
    assert (found.step, found.update, found.phase, found.name) == (0, 0, "backward", NORM)
    assert describe_localisation(found).startswith(
        f"step 0, backward, {NORM} gradient: not summed over tp: each tp rank holds its own part, and their sum is the "
        "baseline; so are 4 others: "
    )
    assert "every other tensor within their bounds" in describe_localisation(found)
    assert (found.causes, found.amplifiers) == ((), ())
    stages = ("sketches-reference", "sketches-candidate", "full-reference", "full-candidate")
    assert bench.made[-4:] == [f"localise-norms-{stage}" for stage in stages]


def test_a_module_that_one_rank_computes_otherwise_is_the_only_cause(bench: Bench) -> None:
    candidate = bench.plan(
        "scaled", "parallel.tensor_model_parallel_size=2", entry="tests.alignment.output_scaled_on_one_rank"
    )
    found = localise(bench.plan("baseline"), candidate, first=first_at(0), run=bench.run, bounds=BOUNDS)
    print(found)
    assert (found.step, found.update, found.phase, found.name) == (0, 0, "forward", FAULTY)
    assert [cause.name for cause in found.causes] == [FAULTY]
    assert describe_localisation(found).startswith(f"step 0, forward, {FAULTY} output: ")
    assert "of the pass that differed are within their bounds: they pass it on" in describe_localisation(found)
    passed_on = [module.name for module in found.amplifiers]
    assert passed_on[:2] == ["decoder.layers.1.mlp.linear_fc2", "decoder.layers.1.mlp"]
    assert "output_layer" in passed_on
    stages = ("full-reference", "full-candidate", "graft-1")
    assert bench.made[-3:] == [f"localise-scaled-{stage}" for stage in stages]
