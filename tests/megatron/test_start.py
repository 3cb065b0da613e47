"""Real models with other weights on every rank start as a baseline of another layout did, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.megatron.perturbation import Perturbation
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.start_report import KindOfStart, StartDifference, StartReport, load_start
from tests.dist.conftest import launch
from tests.megatron.start_worker import FAULTS, PERTURBED, folder_of
from tests.merged_traces import different_bits, distances, merge_step, tensor_of
from tests.sharing import make_once

MODULE = "tests.megatron.start_worker"
BASELINES = ("dense/float32/tp1", "dense/bfloat16/tp1-updated", "moe/float32/tp1")
ONE = (
    "dense/float32/tp1=dense/float32/tp1",
    "dense/float32/tp1-plain-updated<dense/float32/tp1",
    "dense/bfloat16/tp1-moved<dense/bfloat16/tp1-updated",
)
TWO = (
    "dense/float32/tp2-sp<dense/float32/tp1",
    "dense/bfloat16/pp2-vpp2-updated<dense/bfloat16/tp1-updated",
    "dense/bfloat16/dp2<dense/bfloat16/tp1-updated",
    "dense/bfloat16/dp2-moved<dense/bfloat16/tp1-updated",
    "moe/float32/dp2-ep2<moe/float32/tp1",
)
#: Faults of one rank of two.
LONE = ("lone-read", "lone-shape")
FURTHER_BASELINES = ("late-experts/bfloat16/tp1-updated", "dense/float32/tp1-updated", "gpt2/float32/tp1")
FOUR_BASELINES = (
    "dense/bfloat16/tp2-pp2-updated",
    "dense/float32/tp2-pp2-plain-updated",
    "moe/float32/dp4-ep4-updated",
)
FOUR = (
    "dense/float32/pp2-vpp2-dp2-updated<dense/float32/tp1-updated",
    "dense/float32/tp2-dp2-plain-updated<dense/float32/tp1-updated",
    "dense/bfloat16/dp4<dense/bfloat16/tp1-updated",
    "dense/bfloat16/tp2-dp2-plain-updated<dense/bfloat16/tp1-updated",
    "dense/bfloat16/dp4=dense/bfloat16/tp1-updated",
    "late-experts/bfloat16/pp2-dp2-ep2<late-experts/bfloat16/tp1-updated",
    "late-experts/bfloat16/dp4-ep4-updated<late-experts/bfloat16/tp1-updated",
    "moe/float32/tp2-sp-dp2-ep2-updated<moe/float32/tp1",
    "gpt2/float32/tp4-sp<gpt2/float32/tp1",
    "dense/bfloat16/tp4-moved<dense/bfloat16/tp1-updated",
    "late-experts/bfloat16/dp4-ep2-moved<late-experts/bfloat16/tp1-updated",
)
ONE_AGAIN = (
    "dense/bfloat16/tp1-plain<dense/bfloat16/tp2-pp2-updated",
    "dense/float32/tp1<dense/float32/tp2-pp2-plain-updated",
    "moe/float32/tp1-updated<moe/float32/dp4-ep4-updated",
    "late-experts/bfloat16/tp1-moved<late-experts/bfloat16/tp1-updated",
)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, and then two."""

    def run(folder: Path) -> dict[str, object]:
        alone = [fault for fault in FAULTS if fault not in LONE]
        launch(1, folder, ("dense/float64/tp1", *BASELINES, *ONE, *alone), module=MODULE)
        launch(2, folder, (*TWO, *LONE), module=MODULE)
        return {}

    return make_once(tmp_path_factory, "starts", run)[0]


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, then four, and one again."""

    def run(folder: Path) -> dict[str, object]:
        launch(1, folder, (*BASELINES, *FURTHER_BASELINES), module=MODULE)
        launch(4, folder, (*FOUR_BASELINES, *FOUR), module=MODULE)
        launch(1, folder, (*ONE_AGAIN, ONE[-1]), module=MODULE)
        return {}

    return make_once(tmp_path_factory, "large_starts", run)[0]


def facts_of(root: Path, task: str) -> list[dict[str, Any]]:
    """What each rank found."""
    paths = sorted((root / folder_of(task)).glob("facts_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def report_of(root: Path, task: str) -> StartReport:
    report = load_start(root / folder_of(task))
    assert report is not None
    return report


def check(root: Path, task: str) -> None:
    """All of the state, padding rows and every replica included, has the baseline's bits; so has the next update's."""
    own, baseline = task.replace("=", "<").split("<")
    if "-moved" in own:
        baseline = folder_of(f"{'/'.join(own.split('/')[:2])}/tp1-moved<{baseline}")
    start = merge_step(root / folder_of(task) / "state")
    assert different_bits(start, merge_step(root / baseline / "state")) == []
    following = merge_step(root / folder_of(task) / "next")
    expected = merge_step(root / baseline / "next")
    # Moments after the same gradients do not depend on a schedule, whose count of steps no start sets.
    kinds = {"initial", "optimizer"} if own.endswith("-updated") == baseline.endswith("-updated") else {"optimizer"}
    far = {key: far for key, far in distances(following, expected).items() if key.kind in kinds}
    assert max(far.values()) < 1e-5  # the norm of all gradients is summed in another order


@pytest.mark.parametrize("task", [*ONE[1:2], *TWO])
def test_a_run_starts_with_the_baselines_bits(small: Path, task: str) -> None:
    check(small, task)
    facts = facts_of(small, task)
    assert {fact["num_set"] for fact in facts} == {report_of(small, task).num_set} != {0}


@pytest.mark.all
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", [*FOUR, *ONE_AGAIN[:3]])
def test_any_layout_starts_as_any_other_did(large: Path, task: str) -> None:
    check(large, task)


def test_nothing_is_set_where_both_start_alike(small: Path) -> None:
    (task, *_) = ONE
    check(small, task)
    report = report_of(small, task)
    assert report.kinds == {"initial": KindOfStart(num_equal=34, num_set=0)}
    assert report.describe() == (
        "Starts as the baseline does: 34 parameters and buffers were equal already, and nothing was set."
    )


def test_the_report_says_what_was_set_and_how_far_it_was(small: Path) -> None:
    report = report_of(small, TWO[2])
    assert (report.step, report.num_updates) == (2, 1)
    assert report.source == str(small / "dense/bfloat16/tp1-updated/trace")
    names = [item.name for item in report.kinds["initial"].first]
    assert names[0] == "embedding.word_embeddings.weight"
    assert [name.split(".")[2] for name in names[1:]] == ["0"] * 4
    assert {kind: (item.num_equal, item.num_set) for kind, item in report.kinds.items()} == {
        "initial": (0, 34),
        "optimizer": (0, 68),
    }
    relatives = [item.relative for item in report.kinds["initial"].first]
    assert all(relative is not None and relative > 0.5 for relative in relatives)
    assert report.num_padding_rows == report.baseline_padding_rows == {"embedding.word_embeddings.weight": 2}


def test_a_weight_of_bfloat16_is_its_rounded_wide_copy(small: Path) -> None:
    merged = merge_step(small / folder_of(TWO[2]) / "state")
    wide, weight = (tensor_of(merged, kind, "decoder.layers.1.mlp.linear_fc1.weight") for kind in ("initial", "weight"))
    assert wide.dtype is torch.float32
    assert torch.equal(weight, wide.bfloat16())
    assert not torch.equal(weight.float(), wide)  # the baseline's wide copy had been updated


def test_a_start_is_perturbed_behind_it_as_a_checkpoint_is(small: Path) -> None:
    """Wide copies are moved by roundings of bfloat16 and not rounded."""
    moved, before = (
        merge_step(small / folder / "state") for folder in (folder_of(ONE[2]), "dense/bfloat16/tp1-updated")
    )
    perturbation = Perturbation.build(PERTURBED)
    assert perturbation is not None
    for name in ("embedding.word_embeddings.weight", "decoder.layers.3.mlp.linear_fc1.weight"):
        wide = tensor_of(before, "initial", name)
        expected = perturbation.of_weight(wide, whole(name, tuple(wide.shape)), torch.bfloat16).float()
        assert torch.equal(tensor_of(moved, "initial", name), expected)
        assert torch.equal(tensor_of(moved, "weight", name), expected.bfloat16())
    assert report_of(small, ONE[2]).is_perturbed


def test_no_two_whole_tensors_are_held_at_once(small: Path) -> None:
    for task in (*ONE, *TWO):
        for fact in facts_of(small, task):
            assert fact["counts"]["alive"] == 1
            assert fact["counts"]["read"] > 20


def test_a_model_of_megatron_draws_where_its_configuration_says_so(small: Path) -> None:
    for task in (*ONE, *TWO):
        for fact in facts_of(small, task):
            assert fact["draws"] == [[], ["hidden_dropout"]]


ADVICE = "Let both train one model with one optimizer."
REFUSED = "AlignmentError: this run cannot start as its baseline did"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            "name",
            f"{REFUSED} (ROOT/dense/float32/tp1/trace):\n"
            "  - decoder.layers.0.self_attention.q_layernorm.weight is in the baseline only\n"
            f"  - decoder.layers.1.further is in this run only\n{ADVICE}",
        ),
        (
            "shape",
            f"{REFUSED} (ROOT/dense/float32/tp1/trace):\n"
            f"  - decoder.final_layernorm.weight is of shape [33], the baseline's of [32]\n{ADVICE}",
        ),
        (
            "stale",
            f"{REFUSED} (ROOT/dense/bfloat16/tp1-updated/trace):\n"
            "  - decoder.final_layernorm.weight is to be trained, and no optimizer updates it or its wide copy\n"
            "  - decoder.final_layernorm.weight.exp_avg is in the baseline only\n"
            f"  - decoder.final_layernorm.weight.exp_avg_sq is in the baseline only\n{ADVICE}",
        ),
        (
            "elsewhere",
            "AlignmentError: the baseline's state was set, and did not take (ROOT/dense/bfloat16/tp1-updated/trace):\n"
            "  - decoder.layers.0.mlp.linear_fc1.weight still differs\n"
            "The optimizer may update other tensors than the model's; attach after the optimizer is built.",
        ),
        (
            "foreign",
            f"{REFUSED} (ROOT/dense/float32/tp1/trace):\n"
            f"  - the optimizer's state momentum_buffer is none of Adam's\n{ADVICE}",
        ),
        ("missing", "TraceError: ROOT/dense/float32/nowhere/trace: no trace here; run with trace.level=full"),
    ],
)
def test_what_cannot_be_set_is_named(small: Path, fault: str, error: str) -> None:
    (fact,) = facts_of(small, fault)
    assert fact["error"].replace(str(small), "ROOT") == error


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("lone-read", "TraceError: decoder.layers.2.input_layernorm.weight is damaged"),
        (
            "lone-shape",
            f"{REFUSED} (ROOT/dense/float32/tp1/trace):\n"
            f"  - decoder.final_layernorm.weight is of shape [33], the baseline's of [32]\n{ADVICE}",
        ),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_the_same_words(small: Path, fault: str, error: str) -> None:
    facts = facts_of(small, fault)
    assert [fact["error"].replace(str(small), "ROOT") for fact in facts] == [error, error]


def test_a_baseline_that_traced_no_parameters_is_named(small: Path) -> None:
    (fact,) = facts_of(small, "empty")
    assert fact["error"].replace(str(small), "ROOT") == (
        "AlignmentError: ROOT/without-parameters/trace has no parameters before step 2, so no run can start as its "
        "baseline did: trace the baseline with initial in trace.kinds, and all names"
    )


def test_a_narrower_dtype_is_refused_and_a_wider_one_is_exact(small: Path) -> None:
    (narrower,), (wider,) = (facts_of(small, fault) for fault in ("dtype", "wider"))
    assert "embedding.word_embeddings.weight is of float32, the baseline's of float64" in narrower["error"]
    assert wider["num_set"] == 34
    found, expected = (merge_step(small / folder / "state") for folder in ("wider", "dense/float32/tp1"))
    for key, one in found.items():
        if key.kind == "initial":
            assert torch.equal(one.tensor, expected[key].tensor.double())


def test_another_model_is_refused_with_at_most_ten_lines(small: Path) -> None:
    (fact,) = facts_of(small, "model")
    lines = fact["error"].split("\n")
    assert "  - decoder.layers.0.mlp.linear_fc1.weight is of shape [128, 32], the baseline's of [96, 32]" in lines
    assert len(lines) == 13
    assert lines[-2].endswith(" more")


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (StartReport(step=0, num_updates=0), "Starts with its own parameters."),
        (
            StartReport(
                step=0,
                num_updates=3,
                source="trace",
                kinds={
                    "initial": KindOfStart(num_equal=1, num_set=2, first=(StartDifference(name="x", relative=None),)),
                    "optimizer": KindOfStart(num_equal=4, num_set=0),
                },
                num_padding_rows={"embedding": 64},
                is_perturbed=True,
            ),
            "Starts from the baseline's state: 2 of 3 parameters and buffers (first x) and 0 of 4 moments of the "
            "optimizer were another and were set; the vocabulary is padded by 64 rows here and by 0 in the baseline, "
            "and a loss that counts them differs; then every weight was moved by about one rounding.",
        ),
    ],
)
def test_a_report_is_one_sentence(report: StartReport, sentence: str) -> None:
    assert report.describe() == sentence
