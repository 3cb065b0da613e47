"""A training that knows nothing of us is attached by one line, in one process and in layouts of two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler import compare
from mock_scheduler.determinism.operations import Phase, find_operation_logs
from mock_scheduler.errors import ExitCode
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, open_trace
from tests.dist.conftest import launch
from tests.megatron.attach.own_training import LENGTHS
from tests.sharing import make_once

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches

ALONE = ("one", "again", "packed", "evaluated", "recomputed", "grouped", "sparse", "equal-rows")
WORKERS = ("skyrl", "areal", "roll", "nemo_rl")
LATER = ("later", "later-again", "resumed")
ASKED = ("partial", "sketched", "recorded", "scaled", "grafted", "grafted-packed", "perturbed", "named")
FAULTS_ALONE = (
    "stepped-twice",
    "wrong-layout",
    "too-few-ids",
    "too-many-ids",
    "ended-early",
)  # the last one to the end
CALLED = ("called-lm", "called-bridge", "called-early")
PAIRS = (
    "pp2",
    "pp2-vpp2",
    "tp2",
    "dp2",
    "dp2-do",
    "other-row",
    "equal-rows-dp2",
    "extra-pass",
    "skyrl-dp2",
    "unreduced-dp2",
    "called-lm-pp2",
)
ASKED_PAIRS = ("sketched-tp2", "grafted-pp2", "perturbed-tp2", "named-dp2")
# Megatron adds the squares of a norm stage by stage; what was clipped by it differs by that rounding.
BEHIND_THE_NORM = ("gradient_norm", "optimizer", "parameter")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases."""

    def run(folder: Path) -> dict[str, object]:
        alone = (*ALONE, *WORKERS, *LATER, *ASKED, *CALLED, *FAULTS_ALONE)
        launch(1, folder, alone, module="tests.megatron.attach.own_training")
        launch(2, folder, (*PAIRS, *ASKED_PAIRS), module="tests.megatron.attach.own_training")
        return {}

    return make_once(tmp_path_factory, "attached", run)[0]


def merge(folder: Path, *, steps: tuple[int, ...] = (0, 1)) -> dict[TraceKey, MergedTensor]:
    with open_trace(folder / "trace") as trace:
        return {key: trace.merge(key) for step in steps for key in trace.keys(step)}


def different(runs: Path, name: str, *, other: str = "one", steps: tuple[int, ...] = (0, 1)) -> list[TraceKey]:
    """The tensors without equal bits; both runs must have the same names, and no conflicts."""
    found, expected = merge(runs / name, steps=steps), merge(runs / other, steps=steps)
    assert found.keys() == expected.keys()
    assert not [key for key, item in found.items() if item.conflicts or item.missing]
    return [key for key, item in found.items() if not torch.equal(item.tensor, expected[key].tensor)]


def exit_codes(runs: Path, name: str) -> set[str]:
    return {path.read_text(encoding="utf-8") for path in runs.glob(f"{name}.exit.*")}


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", [*ALONE, *ASKED, *PAIRS[:5], *ASKED_PAIRS])
def test_a_run_ends_itself_on_all_ranks_with_its_files(runs: Path, name: str) -> None:
    assert exit_codes(runs, name) == {"0"}
    stated = load(runs / name / "run.json")
    assert (stated["status"], stated["num_steps"]) == ("completed", 2)
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["metrics"]["reward"] == 0.0
    assert not (runs / name / "error.json").exists()


@pytest.mark.parametrize("name", ["again", "evaluated", "recomputed"])
def test_the_same_layout_has_equal_bits_whatever_runs_in_between(runs: Path, name: str) -> None:
    assert different(runs, name) == []


@pytest.mark.parametrize("name", WORKERS)
def test_an_adapter_attaches_to_a_worker_as_a_line_does_to_a_loop(runs: Path, name: str) -> None:
    assert exit_codes(runs, name) == {"0"}
    assert different(runs, name) == []


def test_gradients_that_are_reduced_behind_several_schedules_are_traced_when_they_are(runs: Path) -> None:
    """SkyRL's trap: what a hook on the schedule's own reduction would show is not reduced."""
    assert different(runs, "skyrl-dp2", other="dp2") == []
    found, expected = merge(runs / "unreduced-dp2", steps=(0,)), merge(runs / "dp2", steps=(0,))
    gradients = [key for key in expected if key.kind == "gradient"]
    assert [key for key in gradients if not found[key].conflicts] == []  # replicas have their own


@pytest.mark.parametrize("name", ["pp2", "pp2-vpp2"])
def test_pipelines_have_equal_bits_before_the_norm(runs: Path, name: str) -> None:
    assert [key for key in different(runs, name, steps=(0,)) if key.kind not in BEHIND_THE_NORM] == []


@pytest.mark.parametrize("name", ["packed", "tp2", "dp2", "dp2-do"])
def test_other_sums_are_near_and_inputs_equal(runs: Path, name: str) -> None:
    found, expected = merge(runs / name, steps=(0,)), merge(runs / "one", steps=(0,))
    assert found.keys() == expected.keys()
    # Adam's first update divides by its own gradient, so that the rounding of a tiny one is as large as any.
    for key, item in ((key, item) for key, item in found.items() if key.kind not in ("optimizer", "parameter")):
        other = expected[key].tensor.double()
        assert float((item.tensor.double() - other).norm()) <= 1e-4 * float(other.norm()), key.describe()
        assert key.kind not in ("input", "initial") or torch.equal(item.tensor, expected[key].tensor)


def test_every_layout_has_the_same_rows(runs: Path) -> None:
    batches = {name: load(runs / name / "run.json")["batches"] for name in ("one", "packed", *PAIRS[:5])}
    assert len({json.dumps(item) for item in batches.values()}) == 1
    with open_trace(runs / "dp2" / "trace") as trace:
        assert sorted(trace.footer(0).rows.lengths) == sorted(LENGTHS)


def test_passes_without_gradients_are_counted_apart(runs: Path) -> None:
    assert load(runs / "one" / "run.json")["forward_passes"] == {"trained": 4, "others": 0}
    assert load(runs / "evaluated" / "run.json")["forward_passes"]["trained"] == 4
    assert load(runs / "evaluated" / "run.json")["forward_passes"]["others"] >= 6


def test_a_block_groups_updates_and_gives_rows_their_ids(runs: Path) -> None:
    with open_trace(runs / "grouped" / "trace") as trace:
        footer = trace.footer(0)
        assert footer.rows.identities == ("row0", "row1", "row2", "row3")
        assert footer.update_rows == ((0, 1), (2, 3))
        assert {key.update for key in trace.keys(1) if key.kind == "gradient"} == {0, 1}


def test_a_run_that_is_observed_from_a_later_step_starts_behind_the_one_before(runs: Path) -> None:
    """Its start has the weights and moments that the steps before left, and so has the start of a run after it."""
    stated = {name: load(runs / name / "start.json") for name in LATER}
    assert [item["num_updates"] for item in stated.values()] == [1, 1, 1]
    assert {kind: item["num_set"] for kind, item in stated["later-again"]["kinds"].items()} == {
        "initial": 0,
        "optimizer": 0,
    }
    assert all(item["num_set"] > 0 for item in stated["resumed"]["kinds"].values())
    for name in LATER:
        assert list(load(runs / name / "run.json")["batches"]) == ["1"]
        assert different(runs, name, other="later", steps=(1,)) == []
    assert different(runs, "later", steps=(1,)) == []
    # Beside a run that is observed from its beginning, the comparison begins where the later one does.
    found = compare(runs / "one", runs / "later")
    assert (found.kind.value, found.headline.partition(":")[0]) == (
        "identical",
        "from step 1 on, where the candidate begins",
    )


def outputs_behind(runs: Path, name: str) -> dict[str, bool]:
    """Whether each output of the first step equals the baseline's, of layers behind the grafted one and the loss."""
    kinds = ("activation", "logits", "loss")
    changed = {key.name for key in different(runs, name, steps=(0,)) if key.kind in kinds}
    names = {key.name for key in merge(runs / "one", steps=(0,)) if key.kind in kinds}
    behind = [item for item in names if not item.startswith(("embedding", "decoder.layers.0", "decoder.layers.1"))]
    return {item: item not in changed for item in behind}


def test_all_that_follows_a_graft_is_the_baselines_in_any_shape_of_rows(runs: Path) -> None:
    """Planted: the second layer's MLP gives 1.5 times its output."""
    found = outputs_behind(runs, "scaled")
    assert {"decoder.layers.2", "decoder.final_layernorm", "output_layer", "lm_loss"} <= found.keys()
    assert not any(found.values())
    for name in ("grafted", "grafted-pp2"):
        assert all(outputs_behind(runs, name).values()), name
    # Packed attention adds in another order, so what is behind the graft is near, and without the graft it is not.
    key = next(key for key in merge(runs / "one", steps=(0,)) if key.name == "lm_loss")
    expected = merge(runs / "one", steps=(0,))[key].tensor
    distances = {
        name: float((merge(runs / name, steps=(0,))[key].tensor - expected).norm() / expected.norm())
        for name in ("scaled", "grafted-packed")
    }
    assert distances["grafted-packed"] <= 1e-6
    assert distances["scaled"] > 1e-4


def test_a_perturbation_is_one_rounding_of_every_weight_and_the_same_in_every_layout(runs: Path) -> None:
    ours, theirs, base = (merge(runs / name, steps=(0,)) for name in ("perturbed", "perturbed-tp2", "one"))
    initial = [key for key in base if key.kind == "initial"]
    assert len(initial) == 27
    for key in initial:
        assert torch.equal(ours[key].tensor, theirs[key].tensor), key.describe()
        moved = float((ours[key].tensor.double() - base[key].tensor.double()).norm() / base[key].tensor.double().norm())
        assert 0.25 * 2**-24 < moved < 4 * 2**-24, key.describe()
    assert load(runs / "perturbed" / "start.json")["is_perturbed"] is True


def test_sketches_of_the_same_run_are_identical_and_of_another_layout_estimate_its_distance(runs: Path) -> None:
    assert compare(runs / "one", runs / "sketched").kind.value == "identical"
    estimated, known = (compare(runs / "one", runs / name).tensors for name in ("sketched-tp2", "tp2"))
    assert estimated is not None
    assert known is not None
    assert estimated.level == "sketch"
    true = {item.key: item.relative for item in known.differences if item.key.kind == "gradient"}
    shown = [item for item in estimated.differences if item.key in true and not item.bit_equal]
    assert len(shown) > 20
    within = [item for item in shown if item.low <= true[item.key] <= item.high]
    # An error bar holds what it says for 19 of 20.
    assert len(within) >= 0.9 * len(shown)


def test_rows_named_by_the_caller_are_the_same_rows_in_every_layout(runs: Path) -> None:
    named = ("row0", "row1", "row2", "row3")
    with open_trace(runs / "named" / "trace") as one, open_trace(runs / "named-dp2" / "trace") as two:
        assert one.footer(0).rows.identities == named
        assert sorted(two.footer(0).rows.identities) == list(named)
        lengths = dict(zip(two.footer(0).rows.identities, two.footer(0).rows.lengths, strict=True))
    assert [lengths[name] for name in named] == list(LENGTHS)
    batches = [load(runs / name / "run.json")["batches"] for name in ("named", "named-dp2")]
    assert batches[0] == batches[1]
    assert compare(runs / "named", runs / "named-dp2", kinds="input").kind.value == "identical"


def test_the_log_of_operations_has_the_trainings_own_from_pass_to_update_and_changes_no_bit(runs: Path) -> None:
    logs = find_operation_logs(runs / "recorded")
    assert sorted(logs) == [0, 1]
    records = [record for record in logs[1][0].records() if record.num_digests]
    assert {record.phase for record in records} == {Phase.FORWARD, Phase.BACKWARD, Phase.OUTSIDE}
    assert "model.decoder.layers.3.mlp.linear_fc2" in {record.module for record in records}
    operators = {record.operator for record in records}
    assert "aten.addcdiv_.default" in operators  # Adam's
    assert not any("allgather" in operator for operator in operators)  # of ours
    parameters, expected = merge(runs / "recorded"), merge(runs / "one")
    # Only parameters were chosen; the last step has the optimizer's state at the end of the run beside them.
    assert Counter((key.step, key.kind) for key in parameters) == {
        (0, "parameter"): 27,
        (1, "parameter"): 27,
        (1, "optimizer"): 55,
    }
    assert parameters[TraceKey(step=1, update=0, kind="optimizer", name="num_updates")].tensor.item() == 2
    assert all(torch.equal(item.tensor, expected[key].tensor) for key, item in parameters.items())


def test_a_run_says_what_keeps_its_order_from_being_followed_and_what_nothing_shows(runs: Path) -> None:
    one, two = (load(runs / name / "run.json") for name in ("one", "tp2"))
    assert one["order_limits"] == []
    assert two["order_limits"] == []
    for stated in (one, two):
        assert (stated["unobserved_modules"], stated["untraced_parameters"]) == ({}, {})
    partial = load(runs / "partial" / "run.json")["untraced_parameters"]
    assert len(partial) == 26
    assert partial["embedding.word_embeddings.weight"] == 64 * 16
    assert "output_layer.weight" not in partial


def test_only_due_steps_are_traced(runs: Path) -> None:
    with open_trace(runs / "sparse" / "trace") as trace:
        assert list(trace.steps) == [1]
    assert different(runs, "sparse", steps=(1,)) == []


@pytest.mark.parametrize("name", ["equal-rows", "equal-rows-dp2"])
def test_equal_rows_are_told_apart_in_every_layout(runs: Path, name: str) -> None:
    with open_trace(runs / name / "trace") as trace:
        names = trace.footer(0).rows.identities
    assert sum(name.endswith("~2") for name in names) == 1
    assert load(runs / name / "run.json")["repeated_rows"] == 2


def test_a_row_that_is_another_on_one_rank_is_found(runs: Path) -> None:
    assert exit_codes(runs, "other-row") == {"0"}
    conflicts = [key for key, item in merge(runs / "other-row", steps=(0,)).items() if item.conflicts]
    assert "tokens" in {key.name for key in conflicts if key.kind == "input"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stepped-twice", "optimizer.step was called without a forward pass with gradients since the update before"),
        ("wrong-layout", "expected tp4 pp1 dp1"),
        ("too-few-ids", "gave 3 ids, but the update's forward passes met more rows: give one id for each row"),
        ("too-many-ids", "gave 5 ids, but the last update's forward passes met 4 rows: give one id for each row"),
        ("extra-pass", "ended without the backward pass of a forward pass"),
    ],
)
def test_a_fault_ends_all_ranks_with_its_message(runs: Path, name: str, text: str) -> None:
    assert exit_codes(runs, name) == {str(int(ExitCode.USAGE))}
    assert text in load(runs / name / "error.json")["message"]
    assert not (runs / name / "run.json").exists()


def test_a_training_that_ends_early_says_so(runs: Path) -> None:
    assert exit_codes(runs, "ended-early") == {"none"}
    assert load(runs / "ended-early" / "run.json")["status"] == ("ended by itself after step 1, before its last step 7")


@pytest.mark.parametrize(
    ("name", "by_hand"), [("called-lm", "one"), ("called-bridge", "one"), ("called-lm-pp2", "pp2")]
)
def test_callbacks_of_a_loop_trace_what_a_line_by_hand_does(runs: Path, name: str, by_hand: str) -> None:
    assert exit_codes(runs, name) == {"0"}
    assert different(runs, name, other=by_hand) == []
    stated, expected = load(runs / name / "run.json"), load(runs / by_hand / "run.json")
    for key in ("status", "num_steps", "batches", "steps"):
        assert stated[key] == expected[key], key
    metrics = [
        [
            json.loads(line)["metrics"]
            for line in (runs / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for run in (name, by_hand)
    ]
    assert metrics[0] == [{key: value for key, value in line.items() if key != "reward"} for line in metrics[1]]


def test_callbacks_leave_all_files_when_the_training_ends_and_observe_nothing_behind_it(runs: Path) -> None:
    assert exit_codes(runs, "called-early") == {"none"}
    left = (runs / "called-early.left.0").read_text(encoding="utf-8").splitlines()
    assert {"run.json", "metrics.jsonl", "trace"} <= {*left}
    stated = load(runs / "called-early" / "run.json")
    assert stated["status"] == "ended by itself after step 1, before its last step 7"
    assert stated["forward_passes"]["trained"] == 4
    assert different(runs, "called-early") == []


def test_importing_the_room_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from mock_scheduler import megatron; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
