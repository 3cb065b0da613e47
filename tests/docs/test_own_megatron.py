"""The example of an own training is plain Megatron-core with one line of ours; alignments find what they must in it.

All that trains is behind ``-m all``.
"""

import ast
from pathlib import Path

import pytest
import yaml

from mock_scheduler import align
from mock_scheduler.command_program.loading import build_loader
from tests.faults.fault import PRECISIONS, Precision
from tests.faults.own.campaign import (
    CLEAN,
    OwnJudgement,
    clean_candidate,
    faulty_candidate,
    judge,
    run_campaign,
    write_config,
)
from tests.faults.own.catalogue import MODELS, OWN_FAULTS, Model, find_own_fault
from tests.faults.own.example import FOLDER
from tests.faults.own.forking import serving

TRAIN = FOLDER / "train.py"


def test_training_is_short_and_knows_no_pipeline() -> None:
    source = TRAIN.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [item.name for node in ast.walk(tree) if isinstance(node, ast.Import) for item in node.names]
        assert not [name for name in imported if name.partition(".")[0] in ("pipelines", "tests")]


def test_training_calls_the_instruments_in_one_line_and_the_host_in_another() -> None:
    tree = ast.parse(TRAIN.read_text(encoding="utf-8"))
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mock_scheduler")
        for alias in node.names
    }
    assert ours == {"megatron", "use_host_device"}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ours]
    assert sorted(node.id for node in used) == ["megatron", "use_host_device"]


def test_every_option_of_the_configuration_reaches_the_command() -> None:
    config = build_loader("align", FOLDER)(())
    assert [key for key in config.passed_keys() if key.startswith("options.") and not config.reaches_command(key)] == []
    assert {candidate.name for candidate in config.align.candidates} == {
        "again",
        "dp2-distributed",
        "packed",
        "recompute",
    }
    assert yaml.safe_load((FOLDER / "align.yaml").read_text(encoding="utf-8"))["command"][-1] == "train.py"


def test_catalogue_has_enough_faults_of_each_phase() -> None:
    assert len(OWN_FAULTS) >= 40
    assert len({fault.id for fault in OWN_FAULTS}) == len(OWN_FAULTS)
    phases = [fault.expected.phase for fault in OWN_FAULTS]
    assert all(phases.count(phase) >= 3 for phase in ("data", "forward", "backward", "update"))
    assert {fault.model for fault in OWN_FAULTS} == set(MODELS) == set(CLEAN)


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no fault is named 'scale-2'; known: mask-shifted, .*, second-beta"):
        find_own_fault("scale-2")


@pytest.mark.all
def test_repetition_passes_and_a_fault_is_named_at_its_place(tmp_path: Path) -> None:
    candidates = [clean_candidate("tp1", ()), faulty_candidate(find_own_fault("qk-norms-not-summed"))]
    with serving():
        path = write_config(
            tmp_path, model="dense", precision="float32", candidates=candidates, num_perturbations=0, emulate=False
        )
        results = align(path.stem, config_path=tmp_path).result.candidates
    found = [judge(item, model="dense", precision="float32") for item in results]
    assert [(item.verdict, item.failure) for item in found] == [("identical", ""), ("diverged", "")]
    assert found[1].is_placed, found[1].sentence


@pytest.mark.all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", list(CLEAN))
def test_all_clean_layouts_pass_and_all_faults_are_found(tmp_path: Path, model: Model, precision: Precision) -> None:
    found = run_campaign(tmp_path, model=model, precision=precision)
    assert not [(item.run, item.fault, item.verdict, item.sentence, item.failure) for item in found if item.is_wrong]
    if model != "tied":
        assert next(item.verdict for item in found if not item.fault) == "identical"  # the same layout again
    assert _share_placed(found) >= 0.9


def _share_placed(found: list[OwnJudgement]) -> float:
    faulty = [item for item in found if item.fault]
    return sum(item.is_placed for item in faulty) / len(faulty)
