"""What the reports of an alignment say, by value: words, proofs, curves, error maps, environments and samples."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.comparison.findings import Finding, OnlyIn
from mock_scheduler.report.alignment.builder import build_view, split_name
from mock_scheduler.report.alignment.curves import draw_curve
from mock_scheduler.report.alignment.environment import ValueDifference
from mock_scheduler.report.alignment.heat import build_error_map, shrink_grid
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison.error_path import Grid
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import RefutedBy
from mock_scheduler.verdict.results import AlignmentResult
from mock_scheduler.verdict.verdict import EmulationFacts, Proof, VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_divergence
from mock_scheduler.verdict.wording.tensors import describe_times, format_share
from mock_scheduler.verdict.wording.verdicts import describe_reason
from tests.report.alignments import SENTENCE, SUSPECT, WORST_SAMPLE, WORST_TOKEN, WRONG, make_result


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignmentResult:
    return make_result(tmp_path_factory.mktemp("alignment"))


@pytest.fixture(scope="module")
def view(result: AlignmentResult) -> AlignmentView:
    return build_view(result)


def candidate(view: AlignmentView, name: str) -> CandidateView:
    return next(item for item in view.candidates if item.name == name)


def test_the_whole_is_as_grave_as_its_gravest_candidate(view: AlignmentView) -> None:
    assert (view.exit_code, view.tone) == (1, "bad")
    assert view.headline == (
        "3 of 7 candidates pass: 1 diverged, 1 suspect, 1 incomparable, 1 unverified, 1 rounding, "
        "1 identical (emulated), 1 identical"
    )
    assert view.seconds == (
        ("baseline", 10.0),
        ("candidates", 60.0),
        ("comparison", 5.0),
        ("emulation", 8.0),
        ("noise", 30.0),
        ("referee", 0.0),
        ("localisation", 12.0),
        ("all else", 3.0),
    )


def test_each_verdict_is_said_in_one_line_with_what_proved_it(view: AlignmentView) -> None:
    said = {
        item.name: (item.verdict.headline, item.verdict.proved_by, item.verdict.smallest_error)
        for item in view.candidates
    }
    assert said["pp2.plain"] == ("every bit is equal, in 26 tensors over 2 steps", "bit-equality", "one changed bit")
    assert said["tp2.plain"] == (
        "every bit is equal to a reference that adds in its order, in 26 tensors over 2 steps",
        "emulation",
        "one changed bit",
    )
    assert said["tp2.clip"] == (SENTENCE, "refuted by noise", "")
    headline, proved_by, smallest = said["dp2.plain"]
    assert headline.startswith("differs by no more than rounding does; nearest is gradient of decoder.layers.")
    assert proved_by == "noise"
    assert smallest == "a relative error above 1.0e-04 of gradients; 5.0e-03 of parameters"
    assert said["dp2.clip"] == (SUSPECT, "–", "")
    headline, *others = said["loose"]
    assert headline.startswith(
        "without DETERMINISTIC_MODE=1 two equal runs may differ as much: "
        "within the stated bounds: 2 metrics over 2 steps"
    )
    assert others == ["–", ""]


def test_the_ladder_is_complete_and_in_order(view: AlignmentView) -> None:
    ladder = [(proof.name, proof.outcome) for proof in candidate(view, "tp2.plain").proofs]
    assert ladder == [
        ("replicas", "proved"),
        ("bit-equality", "open"),
        ("emulation", "proved"),
        ("equal inputs", "not tried"),
        ("noise", "proved"),
        ("referee", "not tried"),
    ]
    failed = candidate(view, "broken").proofs
    assert {(proof.outcome, proof.text) for proof in failed} == {("not tried", "nothing could be compared")}
    assert candidate(view, "tp2.plain").differences.emulated == (
        "26 of 26 tensors equal to the last bit to the reference that adds in its order"
    )


def test_a_divergence_has_its_tensors_with_bounds_and_its_place(view: AlignmentView) -> None:
    found = candidate(view, "tp2.clip")
    first, doubled = found.differences.tensors[0], found.differences.tensors[1]
    assert (first.kind, first.name, first.step) == ("output", "logprobs", 1)
    assert first.relative == f"{0.25 / (0.5 * math.sqrt(28)):.1e}"
    assert (first.bound, first.exceeds) == ("1.0e-04", True)
    assert (doubled.name, doubled.relative) == (WRONG, "1.0e+00")
    assert found.origin.localisation[:3] == (
        ("where", f"step 1, update 0, backward: {WRONG}"),
        (
            "cause",
            "decoder.layers.1.mlp (activation gradient): candidate is 2.000 times the baseline; all before it "
            "is equal, and with the reference's tensor in its place 1 tensor behind it is",
        ),
        (
            "passes it on",
            "decoder.layers.0.mlp (activation gradient): only passes on what decoder.layers.1.mlp does: 0.31, 3.1 "
            "times its relative difference",
        ),
    )
    assert found.consequence.rows == (
        ("clipping", "3 of 24 response tokens (12.50%) change their state; 2 are clipped in the baseline"),
        ("KL to the reference policy", "0.0125 in the baseline, 0.025 here"),
        ("advantages", "move by 0 at most; the largest is 1.5"),
        ("cosine of the update", "0.75 at step 1, update 0 (0.5 times as long)"),
    )


def test_curves_have_both_runs_their_difference_and_its_bounds(view: AlignmentView) -> None:
    (curve,) = candidate(view, "tp2.clip").metrics.curves
    assert (curve.name, curve.steps) == ("pg_loss", (0, 1))
    assert (curve.baseline, curve.candidate) == ((0.5, 0.5), (0.5, 0.75))
    assert curve.differences == (0.0, 0.25)
    assert curve.bounds == (pytest.approx(0.5e-4), pytest.approx(0.75e-4))
    assert curve.first_exceeding_step == 1
    assert curve.ratio == "3,333 times its bound"
    (equal,) = candidate(view, "pp2.plain").metrics.curves
    assert (equal.bit_equal, equal.ratio) == (True, "")


def test_the_error_map_shows_the_update_in_which_the_runs_part(view: AlignmentView) -> None:
    found = candidate(view, "tp2.clip").differences.error_map
    assert found is not None
    assert (found.step, found.update, found.is_parting) == (1, 0, True)
    tables = {table.title: table for table in found.layers}
    assert list(tables) == [
        "forward",
        "backward (gradients of activations)",
        "gradients of parameters",
        "update",
    ]
    gradients = tables["gradients of parameters"]
    assert (gradients.rows, gradients.columns) == (("mlp.linear_fc1", "mlp.linear_fc2"), ("0", "1"))
    shades = [[None if cell is None else cell.shade for cell in row] for row in gradients.cells]
    assert shades == [["equal", "out3"], ["equal", "equal"]]
    forward = tables["forward"]
    (logprobs,) = [cell for row in forward.cells for cell in row if cell is not None and cell.is_first]
    assert logprobs.words.startswith("output of logprobs at step 1, update 0: 9.4e-02, bound 1.0e-04")
    assert found.steps is not None
    assert found.steps.columns == ("0", "1")
    assert candidate(view, "pp2.plain").differences.error_map is None


def test_a_cell_counts_the_elements_that_have_no_say(result: AlignmentResult) -> None:
    verdict = next(item.verdict for item in result.candidates if item.name == "tp2.clip")
    assert verdict is not None
    assert verdict.tensors is not None
    differences = tuple(
        replace(item, relative=0.0, num_excluded=3) if item.key.kind == "parameter" else item
        for item in verdict.tensors.differences
    )
    shown = replace(verdict, tensors=replace(verdict.tensors, differences=differences))
    found = build_error_map(shown, max_cells=1000)
    assert found is not None
    update = next(table for table in found.layers if table.title == "update")
    (cell,) = [item for row in update.cells for item in row if item is not None and "last bit" not in item.words]
    said = "equal within the rounding of storing; 3 elements of 32 without a say"
    assert (cell.text, cell.words) == ("=", f"parameter of {WRONG} at step 1, update 0: {said}")


def test_the_worst_sample_is_read_turn_by_turn_with_its_tokens_differences(view: AlignmentView) -> None:
    """The value of a prediction lies at the token before, and is shown at the token that it is about."""
    sample = candidate(view, "tp2.clip").sample
    assert sample is not None
    assert (sample.identity, sample.step, sample.problem) == (WORST_SAMPLE, 1, "")
    assert (sample.worst_position, sample.max_difference) == (WORST_TOKEN, 0.25)
    assert sample.tensor == "output logprobs, update 0"
    assert [(turn.title, turn.texts, turn.differences) for turn in sample.turns] == [
        ("prompt", ("<bos>", "wall"), (None, 0.0)),
        ("turn 0", ("Left", "Right"), (0.0, 0.25)),
        ("environment", ("open", "\n"), (0.0, 0.0)),
        ("turn 1", ("Right",), (0.0,)),
    ]
    assert candidate(view, "pp2.plain").sample is None
    rounded = candidate(view, "dp2.plain").sample
    assert rounded is not None
    assert rounded.tensor.startswith(("activation ", "activation gradient "))


def test_environments_say_what_differs_and_which_rule_the_contract_has(view: AlignmentView) -> None:
    found = candidate(view, "tp2.clip").environment
    assert found is not None
    assert found.config == (
        ValueDifference(name="parallel.tensor_model_parallel_size", baseline="1", candidate="2", rule="may differ"),
        ValueDifference(name="pg_clip", baseline="0.2", candidate="0.1", rule="may differ"),
    )
    assert (found.settings, found.num_settings, found.breaches, found.num_must_match) == ((), 3, (), 2)
    assert found.ledger == (
        ("built", "engine 0, environment 0"),
        ("suppressed: had no effect", "suspend 4"),
        ("answered from the recording", "get_batch 2"),
    )
    loose = candidate(view, "loose").environment
    assert loose is not None
    assert loose.settings == (ValueDifference(name="OMP_NUM_THREADS", baseline="1", candidate="2", rule="must match"),)
    assert loose.breaches == ("OMP_NUM_THREADS",)
    assert view.must_match == (("sequence_length", "64"), ("determinism.OMP_NUM_THREADS", '"1"'))
    assert ("torch", "2.13.0") in view.packages
    assert view.settings == (("OMP_NUM_THREADS", "1"), ("NCCL_ALGO", "Ring"))


def test_a_folder_that_is_gone_leaves_its_part_empty_and_says_so(result: AlignmentResult, tmp_path: Path) -> None:
    first = result.candidates[1]
    assert first.run is not None
    gone = replace(first, run=replace(first.run, output_dir=tmp_path / "gone"), localisation=None)
    view = build_view(replace(result, candidates=(gone,), recording_dir=None))
    (found,) = view.candidates
    assert (found.metrics.curves, found.verdict.kind) == ((), VerdictKind.DIVERGED)
    assert found.environment is not None
    assert found.environment.notes[0].startswith(f"{tmp_path / 'gone' / 'config.yaml'} cannot be read: No such file")
    assert found.sample is not None
    assert found.sample.problem == "its text is not known: the run has no recording"
    assert view.notes == ()


def test_a_view_that_is_not_full_reads_no_folder(result: AlignmentResult, tmp_path: Path) -> None:
    moved = replace(result, baseline=replace(result.baseline, output_dir=tmp_path), recording_dir=tmp_path)
    view = build_view(moved, is_full=False)
    assert view.notes == ()
    assert {
        (item.environment, item.differences.error_map, item.sample, item.metrics.curves) for item in view.candidates
    } == {(None, None, None, ())}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tp2-sp-pp2", ("tp2-sp-pp2", "plain")),
        ("dp4.recompute", ("dp4", "recompute")),
        ("torch-2.13", ("", "")),
        ("attention", ("", "")),
        ("tp2x.plain", ("", "")),
    ],
)
def test_only_names_of_layouts_make_a_matrix(name: str, expected: tuple[str, str]) -> None:
    assert split_name(name) == expected


@pytest.mark.parametrize(
    ("ratio", "short", "words"),
    [
        (0.0, "=", "equal"),
        (0.004, "<1%", "<1% of its bound"),
        (0.49, "49%", "49% of its bound"),
        (31.4, "31×", "31 times its bound"),
        (math.inf, "∞", "∞ times its bound"),
    ],
)
def test_a_share_of_a_bound_is_said_in_few_characters(ratio: float, short: str, words: str) -> None:
    assert (format_share(ratio), describe_times(ratio)) == (short, words)


def test_a_grid_of_many_columns_is_shrunk_and_what_is_outside_of_layers_stays_apart() -> None:
    spans = tuple((label, label) for label in (*map(str, range(20)), "outside"))
    grid = Grid(title="t", rows=("a",), spans=spans, cells=((None,) * 21,))
    shrunk, size = shrink_grid(grid, 6)
    assert size == 4
    assert shrunk.columns == ("0 to 3", "4 to 7", "8 to 11", "12 to 15", "16 to 19", "outside")
    assert shrink_grid(grid, 21) == (grid, 1)


def test_an_axis_has_as_many_digits_as_tell_its_ends_apart(view: AlignmentView) -> None:
    """0.5 and 0.500001 were both labelled 0.5."""
    (curve,) = candidate(view, "dp2.plain").metrics.curves
    drawing = draw_curve(curve)
    assert [label for _, label in drawing.values] == ["0.5", "0.500001"]
    assert [bar.exceeds for bar in drawing.bars] == [False, False]
    assert [label for _, label in drawing.decades] == ["1e-6", "1e-4"]


@pytest.mark.parametrize(
    ("number", "headline"),
    [(1, "the one candidate does not pass: 1 diverged"), (2, "the one candidate passes: 1 identical")],
)
def test_one_candidate_is_no_set_of_candidates(result: AlignmentResult, number: int, headline: str) -> None:
    """It was ``none of 1 candidate pass``, and ``all of 1 candidate passes``."""
    assert build_view(replace(result, candidates=(result.candidates[number],)), is_full=False).headline == headline


def test_a_first_divergence_is_told_once(result: AlignmentResult) -> None:
    """The proof by noise and the reason each repeated the whole paragraph that stands above them."""
    diverged = result.candidates[1]
    of_noise, emulated = diverged.verdict, result.candidates[4].verdict
    assert of_noise.first is not None
    finding = Finding(kind="gradient", step=0, update=0, name="v", fact=OnlyIn(side="baseline"))
    elsewhere = Divergence(step=0, update=0, kind="gradient", name="v", evidence=finding)
    facts = EmulationFacts(layout="tp2 pp1 dp1", may_round=False)
    emulation = Proof(name="emulation", outcome="refuted", facts=facts, compared=emulated)
    direct = replace(of_noise, proofs=())
    noise = Proof(name="noise", outcome="refuted", compared=direct)
    for first, why in ((of_noise.first, of_noise.why), (elsewhere, RefutedBy(proof="emulation"))):
        told = replace(diverged, verdict=replace(of_noise, first=first, why=why, proofs=(emulation, noise)))
        (view,) = build_view(replace(result, candidates=(told,)), is_full=False).candidates
        said = next(proof.text for proof in view.proofs if proof.name == "noise")
        texts = [view.verdict.first_divergence, view.verdict.reason, *(proof.text for proof in view.proofs)]
        found = view.verdict.first_divergence.removeprefix("before more was traced: ")  # it was localised elsewhere
        assert (found, view.verdict.reason) == (describe_divergence(first), "")
        assert found != view.verdict.first_divergence
        assert "; beyond the stated bounds: 1 of 2 metrics, 2 of 26 tensors" in said
        assert sum(describe_divergence(of_noise.first) in text for text in texts) == 1
        assert sum(describe_divergence(first) in text for text in texts) == 1


def test_a_reason_keeps_what_neither_sentence_nor_proofs_say(result: AlignmentResult) -> None:
    failed = next(item for item in result.candidates if item.name == "broken")
    (view,) = build_view(replace(result, candidates=(failed,)), is_full=False).candidates
    assert view.verdict.reason == describe_reason(failed.verdict)
