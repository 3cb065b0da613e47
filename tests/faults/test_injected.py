"""Real trainings with real faults: those of one process fire, are taken back, and are found at the right place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.layouts.training import VOCAB_SIZE
from mock_scheduler.comparison.bounds.bounds import EXACT
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.divergences import count_before, find_divergences
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_divergence
from tests.faults.__main__ import main
from tests.faults.campaign import CLEAN
from tests.faults.cases import world_size
from tests.faults.catalogue import FAULTS, MEASURED, find_fault
from tests.faults.fault import Run
from tests.faults.matrix.judging import is_called, is_placed
from tests.faults.matrix.table import from_json
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


@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("update", [0, 1])
def test_updates_have_targets_on_both_halves_of_the_vocabulary_and_advantages(update: int, root: Path) -> None:
    """So that faults of any tp rank's part of the softmax, and of any update, have something to act on."""
    with open_trace(root / f"before-{Run().label}") as reader:
        tokens, entropy, loss = (
            reader.merge(TraceKey(step=0, update=of, kind=kind, name=name)).tensor
            for of, kind, name in ((0, "input", "tokens"), (update, "output", "entropy"), (update, "loss", "pg_loss"))
        )
    targets = tokens[1:][entropy[:-1] != 0.0]  # a row's last token predicts none
    assert len(targets) >= 18
    num_of_second = int((targets >= VOCAB_SIZE // 2).sum())
    assert 0.25 < num_of_second / len(targets) < 0.75
    assert int((loss != 0.0).sum()) >= 12


@pytest.mark.parametrize("fault", [fault.id for fault in _ALONE])
def test_fault_fires_is_found_at_its_place_and_taken_back(
    fault: str, outcomes: Mapping[str, Outcome], root: Path
) -> None:
    planted = find_fault(fault)
    assert outcomes[fault].error == ""
    assert outcomes[fault].fired[fault] > 0
    before = root / f"before-{planted.shows.label}"
    compared = compare_trace_folders(before, root / fault, bounds=EXACT)
    first = find_divergences(None, compared)[0]
    sentence = describe_divergence(count_before(first, compared))
    assert is_placed(first, planted.expected), sentence
    assert is_called(sentence, planted.expected), sentence
    after = compare_trace_folders(before, root / f"after-{planted.shows.label}", bounds=EXACT)
    assert decide(None, after, bounds=EXACT).kind is VerdictKind.IDENTICAL


@pytest.mark.parametrize("fault", [fault.id for fault in _ALONE])
def test_fault_changes_no_bit_where_it_must_be_silent(fault: str, outcomes: Mapping[str, Outcome], root: Path) -> None:
    planted = find_fault(fault)
    assert outcomes[f"silent-{fault}"].fired[fault] > 0 or planted.is_idle_where_silent
    before = root / f"before-{planted.silent.label}"
    compared = compare_trace_folders(before, root / f"silent-{fault}", bounds=EXACT)
    assert decide(None, compared, bounds=EXACT).kind is VerdictKind.IDENTICAL


@pytest.mark.all
@pytest.mark.timeout(7200)
def test_catalogue_is_found_at_its_places_without_a_false_alarm(tmp_path: Path) -> None:
    main(["--json", str(tmp_path / "matrix.json")])
    judged = from_json(json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8")))
    clean = [item for item in judged if item.fault.startswith(CLEAN)]
    faults = [item for item in judged if not item.fault.startswith(CLEAN)]
    assert len(faults) == 2 * len(FAULTS)
    assert not [(item.fault, item.precision, item.error) for item in judged if item.error]
    assert not [(item.fault, item.precision, item.sentence) for item in clean if item.is_found]
    assert not [(item.fault, item.precision) for item in faults if not item.is_silent]
    measured = [item for item in faults if find_fault(item.fault).number in MEASURED]
    assert not [(item.fault, item.precision, item.place) for item in measured if item.score != "whole"]
    assert sum(item.score == "whole" for item in faults) >= 0.9 * len(faults)
