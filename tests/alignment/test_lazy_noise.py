"""The noise is measured only where a candidate is not proved without it, or where it is asked for."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.cache import NotReusable, Reusable
from mock_scheduler.alignment.runs.run_cache import RunCache
from tests.alignment.test_align import CONFIG, Bench, FakeLauncher, write_results

#: Far below twelve units roundoff, and a fault.
ROUNDED, WRONG = 1.0 + 2**-23, 1.01
NOISE = [f"noise-{seed}" for seed in range(5)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.write(CONFIG.format(output_dir=tmp_path / "out dir=1") + "  proofs: {localise: false}\n")
    return bench


def gradients(**values: float) -> FakeLauncher:
    """Starts runs that write these gradients; all others write 1."""
    return FakeLauncher({name.replace("_", "-"): partial(write_results, gradient=at) for name, at in values.items()})


def verdicts(bench: Bench) -> list[str]:
    return [item["verdict"] for item in json.loads((bench.root / "align.json").read_text())["candidates"]]


def started(launcher: FakeLauncher) -> list[str]:
    return [run.name for run in launcher.started if run.name not in ("baseline", "same", "tp2")]


def test_a_candidate_with_the_bits_of_its_reference_needs_no_noise(bench: Bench) -> None:
    launcher = gradients(tp2=ROUNDED, emulated_tp2=ROUNDED)
    assert bench.align(launcher) == 0
    assert verdicts(bench) == ["identical", "identical (emulated)"]
    assert started(launcher) == ["emulated-tp2"]


def test_it_is_measured_where_it_is_asked_for(bench: Bench) -> None:
    launcher = gradients(tp2=ROUNDED, emulated_tp2=ROUNDED)
    assert bench.align(launcher, "align.proofs.noise=always") == 0
    assert verdicts(bench) == ["identical", "identical (emulated)"]
    assert started(launcher) == ["emulated-tp2", *NOISE]


def test_a_fault_that_candidate_and_reference_share_is_found(bench: Bench) -> None:
    """Bits that equal those of the reference prove nothing where this one computes something else itself."""
    launcher = gradients(tp2=WRONG, emulated_tp2=WRONG, float64_tp2=WRONG)
    assert bench.align(launcher) == 2
    assert verdicts(bench) == ["identical", "suspect"]
    assert set(NOISE) < set(started(launcher))


def test_a_fault_of_the_candidate_alone_is_found(bench: Bench) -> None:
    launcher = gradients(tp2=1.0 + 2**-22, emulated_tp2=ROUNDED)
    assert bench.align(launcher) == 1
    assert verdicts(bench) == ["identical", "diverged"]


def test_runs_that_are_taken_again_cost_no_seconds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of an earlier alignment's runs were in the parts and not in the whole: 377 s of noise of 51 s."""
    launcher = gradients(tp2=ROUNDED, emulated_tp2=ROUNDED)
    assert bench.align(launcher, "align.proofs.noise=always") == 0
    find = RunCache.find

    def find_slow(cache: RunCache, run: PlannedRun) -> Reusable | NotReusable:
        found = find(cache, run)
        return replace(found, elapsed_s=1000.0) if isinstance(found, Reusable) else found

    monkeypatch.setattr(RunCache, "find", find_slow)
    assert bench.align(launcher, "align.proofs.noise=always", "align.proofs.referee=never") == 0
    assert started(launcher) == ["emulated-tp2", *NOISE]
    times = json.loads((bench.root / "align.json").read_text())["times"]
    assert sum(seconds for name, seconds in times.items() if name != "total_s") <= times["total_s"]
