"""Measured noise on real trainings: a legal change of layout is within it, 1 % in one gradient is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.divergences import count_before, find_divergences
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_divergence
from tests.faults.catalogue import ONE_GRADIENT
from tests.faults.fault import Run
from tests.faults.matrix.judging import is_called, is_placed
from tests.faults.runs import run_jobs
from tests.faults.worker import Job

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]

NUM_PERTURBED = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and its perturbed runs of one process, tp2, and tp2 with the fault; in float32, two updates each."""
    folder = tmp_path_factory.mktemp("noise")
    jobs = [_job(folder, "baseline", Run())]
    jobs += [_job(folder, f"perturbed-{seed}", Run(), seed=seed) for seed in range(NUM_PERTURBED)]
    jobs += [_job(folder, "tp2", ONE_GRADIENT.shows), _job(folder, "fault", ONE_GRADIENT.shows, ONE_GRADIENT.id)]
    outcomes = {Path(job.folder).name: outcome for job, outcome in run_jobs(jobs)}
    assert [name for name, outcome in outcomes.items() if outcome.error] == []
    assert outcomes["fault"].fired == {ONE_GRADIENT.id: 2}  # one weight on each of two ranks
    return folder


def _job(folder: Path, name: str, run: Run, *faults: str, seed: int | None = None) -> Job:
    changes = {} if seed is None else {"perturbation": {"seed": seed}}
    return Job(folder=str(folder / name), run=run, precision="float32", faults=faults, changes=changes)


@pytest.fixture(scope="module")
def noise(root: Path) -> NoiseBounds:
    """Measured from all perturbed runs."""
    perturbed = [root / f"perturbed-{seed}" for seed in range(NUM_PERTURBED)]
    return measure_noise(root / "baseline", perturbed, seeds=range(NUM_PERTURBED))


def test_another_layout_is_within_the_noise_of_perturbed_runs(root: Path, noise: NoiseBounds) -> None:
    found = compare_trace_folders(root / "baseline", root / "tp2", bounds=noise)
    assert decide(None, found, bounds=noise).kind is VerdictKind.ROUNDING
    gradients = [item for item in found.differences if item.key.kind == "gradient"]
    assert any(not item.bit_equal for item in gradients)  # sums of two ranks round differently
    assert all(math.isfinite(item.tolerance) for item in gradients)


def test_one_per_cent_in_one_gradient_is_beyond_it_and_named(root: Path, noise: NoiseBounds) -> None:
    found = compare_trace_folders(root / "baseline", root / "fault", bounds=noise)
    assert decide(None, found, bounds=noise).kind is VerdictKind.DIVERGED
    (name,) = ONE_GRADIENT.expected.names
    wrong = [item for item in found.exceeding if (item.key.kind, item.key.update) == ("gradient", 0)]
    assert [item.key.name for item in wrong] == [name]
    assert wrong[0].relative == pytest.approx(0.01, rel=1e-3)
    assert 12 * 2.0**-24 <= wrong[0].tolerance < 1e-4
    first = find_divergences(None, found)[0]
    assert is_placed(first, ONE_GRADIENT.expected)
    assert is_called(describe_divergence(count_before(first, found)), ONE_GRADIENT.expected)
