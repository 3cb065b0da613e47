"""Real trainings with real faults: those of one process fire, are taken back, and are found at the right place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mock_scheduler.align.proof_bounds import EXACT
from mock_scheduler.compare.divergences import describe_divergence, find_divergences
from mock_scheduler.compare.traces import compare_trace_folders
from mock_scheduler.compare.verdict import Verdict, decide
from tests.faults.__main__ import main
from tests.faults.cases import world_size
from tests.faults.catalogue import FAULTS, find_fault
from tests.faults.fault import Run
from tests.faults.judging import first_observed, is_called, is_placed
from tests.faults.runs import run_jobs
from tests.faults.worker import Job, Outcome

_ALONE = [fault for fault in FAULTS if fault.inject is not None and world_size(fault.shows) == 1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all trainings of this module are."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(root: Path) -> Mapping[str, Outcome]:
    """Each fault of one process between the clean runs of what it changes and of what it must not, by folder."""
    clean = dict.fromkeys(run for fault in _ALONE for run in (fault.shows, fault.silent))
    jobs = [_job(root, f"before-{run.label}", run) for run in clean]
    for fault in _ALONE:
        jobs.append(_job(root, fault.id, fault.shows, fault.id))
        jobs.append(_job(root, f"silent-{fault.id}", fault.silent, fault.id))
    jobs += [_job(root, f"after-{run.label}", run) for run in clean]
    return {Path(job.folder).name: outcome for job, outcome in run_jobs(jobs)}


def _job(root: Path, name: str, run: Run, *faults: str) -> Job:
    return Job(folder=str(root / name), run=run, precision="float32", faults=faults)


@pytest.mark.parametrize("fault", [fault.id for fault in _ALONE])
def test_fault_fires_is_found_at_its_place_and_taken_back(
    fault: str, outcomes: Mapping[str, Outcome], root: Path
) -> None:
    planted = find_fault(fault)
    assert outcomes[fault].error == ""
    assert outcomes[fault].fired[fault] > 0
    before = root / f"before-{planted.shows.label}"
    compared = compare_trace_folders(before, root / fault, bounds=EXACT)
    first = first_observed(find_divergences(None, compared))
    assert first is not None
    sentence = describe_divergence(first, compared)
    assert is_placed(first, planted.expected), sentence
    assert is_called(sentence, planted.expected), sentence
    after = compare_trace_folders(before, root / f"after-{planted.shows.label}", bounds=EXACT)
    assert decide(None, after, bounds=EXACT).verdict is Verdict.IDENTICAL


@pytest.mark.parametrize("fault", [fault.id for fault in _ALONE])
def test_fault_changes_no_bit_where_it_must_be_silent(fault: str, outcomes: Mapping[str, Outcome], root: Path) -> None:
    planted = find_fault(fault)
    assert outcomes[f"silent-{fault}"].fired[fault] > 0 or planted.is_idle_where_silent
    before = root / f"before-{planted.silent.label}"
    compared = compare_trace_folders(before, root / f"silent-{fault}", bounds=EXACT)
    assert decide(None, compared, bounds=EXACT).verdict is Verdict.IDENTICAL


@pytest.mark.all
@pytest.mark.timeout(7200)
def test_whole_catalogue_is_found_and_no_clean_layout_is_called_wrong() -> None:
    assert main(["--precision", "float32,bfloat16"]) == 0
