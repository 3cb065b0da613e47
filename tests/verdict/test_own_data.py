"""Verdicts on programs with data of their own: no rollouts, rows by content, metrics of any training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.bounds.bounds import EXACT
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import ClipRule
from mock_scheduler.report.verdict_json import verdict_to_json
from mock_scheduler.run_folder.finished_run import load_summary
from mock_scheduler.run_folder.inputs import parse_selection
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, DimName, TraceEntry, virtual_start
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices
from mock_scheduler.verdict.compare_runs import compare_paths, judge_runs
from mock_scheduler.verdict.consequence.consequence import find_consequence
from mock_scheduler.verdict.reasons import OtherBatches, OtherData, OtherRollouts
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.consequence import consequence_rows, describe_consequence
from mock_scheduler.verdict.wording.findings import describe_note
from mock_scheduler.verdict.wording.verdicts import describe_reason
from tests.content_traces import (
    HIDDEN,
    KINDS,
    LAYOUT,
    LOSS,
    ContentRank,
    ContentStep,
    content_step,
    save_content_run,
    save_content_trace,
)

TOKENS = {"seven": [7, 8, 9, 10], "eight": [8, 8], "nine": [9, 1, 2, 3, 4], "ten": [10]}
STEP = content_step(TOKENS)
DP2 = [
    ContentRank(coordinates={**LAYOUT, "dp": dp}, micro_batches=[[(name, range(len(TOKENS[name])))] for name in own])
    for dp, own in enumerate([("ten", "seven"), ("nine", "eight")])
]


def compare(tmp_path: Path, *, level: str = "full", kinds: Sequence[str] = (), **candidate: object) -> Verdict:
    """The verdict on a candidate in another layout; keywords as of ``save_content_run``."""
    options: dict[str, object] = {"step": STEP, "ranks": DP2, "level": level, **candidate}
    save_content_run(tmp_path / "baseline", STEP, level=level)  # type: ignore[arg-type]
    save_content_run(tmp_path / "candidate", **options)  # type: ignore[arg-type]
    return compare_paths(
        tmp_path / "baseline",
        tmp_path / "candidate",
        selection=parse_selection(steps=None, kinds=kinds),
        tolerance=["activation=1e-6", "metric=1e-9", "gradient=1e-6", "update=1e-6"],
    ).verdict


@pytest.mark.parametrize("level", ["full", "sketch"])
def test_the_same_rows_in_another_layout_are_identical(tmp_path: Path, level: str) -> None:
    verdict = compare(tmp_path, level=level)
    assert verdict.kind is VerdictKind.IDENTICAL
    assert verdict.tensors is not None
    assert verdict.metrics is not None
    assert len(verdict.tensors.differences) == 5  # the initial parameter is exact, and none of them
    assert [item.name for item in verdict.metrics.differences] == ["grad_norm", "loss", "lr"]
    assert verdict.tensors.notes == ()


def test_a_changed_value_is_found_at_its_row_and_position(tmp_path: Path) -> None:
    verdict = compare(tmp_path, step=STEP.changed("nine", 3, 2, by=0.5))
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.first is not None
    assert verdict.first.place == (0, 0, "activation", HIDDEN)
    worst = verdict.first.worst
    assert worst is not None
    assert (worst.sample, worst.position, worst.index) == ("nine", 3, (5, 2))
    assert [place.global_rank for place in worst.candidate_ranks] == [1]
    assert "nine" in describe_reason(verdict)


def test_a_changed_value_is_found_by_sketches(tmp_path: Path) -> None:
    verdict = compare(tmp_path, level="sketch", step=STEP.changed("nine", 3, 2, by=0.5))
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.first is not None
    assert verdict.first.place == (0, 0, "activation", HIDDEN)


def without(*names: str) -> ContentStep:
    return content_step({name: ids for name, ids in TOKENS.items() if name not in names})


@pytest.mark.parametrize("level", ["full", "sketch"])
@pytest.mark.parametrize(
    ("step", "text"),
    [
        (without("nine"), "1 row of 4 of step 0 is in the baseline only: nine"),
        (content_step({**TOKENS, "six": [6]}), "1 row of 5 of step 0 is in the candidate only: six"),
        (
            content_step({**{name: ids for name, ids in TOKENS.items() if name != "ten"}, "other": [10]}),
            "1 row of 4 of step 0 is in the baseline only: ten",
        ),
        (
            content_step({**TOKENS, "nine": [9, 1, 2]}),
            "1 row of step 0 has another length: nine has 5 tokens in the baseline and 3 in the candidate",
        ),
    ],
    ids=["missing", "additional", "another", "shorter"],
)
def test_other_rows_are_incomparable_and_the_first_is_named(
    tmp_path: Path, level: str, step: ContentStep, text: str
) -> None:
    verdict = compare(tmp_path, level=level, step=step, ranks=None)
    assert verdict.kind is VerdictKind.INCOMPARABLE
    assert isinstance(verdict.why, OtherData)
    assert describe_reason(verdict).startswith(f"the two runs trained on other data: {text}")


def test_other_rows_are_named_where_the_digests_of_batches_tell_them(tmp_path: Path) -> None:
    verdict = compare(tmp_path, step=without("nine"), ranks=None, batch="b1")
    assert isinstance(verdict.why, OtherData)
    assert "1 row of 4 of step 0 is in the baseline only: nine" in describe_reason(verdict)


def test_other_rows_of_a_step_that_was_not_traced_are_incomparable(tmp_path: Path) -> None:
    verdict = compare(tmp_path, batch="b1")
    assert verdict.kind is VerdictKind.INCOMPARABLE
    assert verdict.why == OtherBatches(first_step=0, num_steps=1, num_shared=1)
    assert "rollout" not in describe_reason(verdict)


def test_rows_counted_in_one_run_alone_need_ids(tmp_path: Path) -> None:
    verdict = compare(tmp_path, step=content_step({**TOKENS, "ten~2": [10]}), ranks=None)
    assert describe_reason(verdict).endswith(
        "rows of equal content, ~2 and so on, need ids: run.step(number, rows=...)"
    )


def test_other_tokens_of_one_row_are_incomparable(tmp_path: Path) -> None:
    """Ids of the caller say nothing of the tokens; values that follow from them are no divergence."""
    other = replace(STEP, tokens={**TOKENS, "nine": [9, 1, 2, 3, 5], "seven": [7, 8, 9, 11]})
    verdict = compare(tmp_path, step=other)
    assert isinstance(verdict.why, OtherData)
    assert describe_reason(verdict).startswith(
        "the two runs trained on other data: input of tokens at step 0, update 0 differs at 2 tokens, first at "
        "position 4 of row nine: 4 in the baseline and 5 in the candidate"
    )


def test_other_tokens_are_other_data_whether_or_not_runs_repeat_themselves(tmp_path: Path) -> None:
    other = replace(STEP, tokens={**TOKENS, "nine": [9, 1, 2, 3, 5]})
    for name, step in (("a", STEP), ("b", other)):
        save_content_run(tmp_path / name, step)
    ours, theirs = (load_summary(name, tmp_path / name, elapsed_s=None) for name in "ab")
    verdict = judge_runs(ours, theirs, bounds=EXACT, is_deterministic=False)
    assert verdict.kind is VerdictKind.INCOMPARABLE
    assert isinstance(verdict.why, OtherData)


def test_other_tokens_are_found_whatever_kinds_are_chosen(tmp_path: Path) -> None:
    other = replace(STEP, tokens={**TOKENS, "nine": [9, 1, 2, 3, 5]})
    assert isinstance(compare(tmp_path, step=other, kinds=["gradient"]).why, OtherData)


def test_sketches_find_other_tokens_and_say_how_to_see_the_row(tmp_path: Path) -> None:
    other = replace(STEP, tokens={**TOKENS, "nine": [9, 1, 2, 3, 5]})
    verdict = compare(tmp_path, level="sketch", step=other)
    assert isinstance(verdict.why, OtherData)
    assert "input of tokens at step 0, update 0 differs; which rows, whole tensors alone tell" in describe_reason(
        verdict
    )


@pytest.mark.parametrize("name", ["labels", "loss_mask"])
def test_other_labels_and_masks_are_incomparable(tmp_path: Path, name: str) -> None:
    verdict = compare_more(tmp_path, "input", name, [1.0, 0.0], [1.0, 1.0])
    assert isinstance(verdict.why, OtherData)
    assert (
        f"input of {name} at step 0, update 0 differs at 1 token, first at position 1 of row eight"
        in describe_reason(verdict)
    )


def compare_more(tmp_path: Path, kind: str, name: str, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Both runs trace one tensor more, at the tokens of row ``eight``."""
    steps = []
    for values in (ours, theirs):
        start = virtual_start("eight")
        spec = ShardSpec(
            name=name,
            global_shape=(VIRTUAL_TOKENS,),
            local_shape=(2,),
            splits=(Split(dim=0, blocks=blocks_of_indices([start, start + 1])),),
        )
        dims: tuple[DimName, ...] = ("token",)
        more = TraceEntry(update=0, kind=kind, spec=spec, tensor=torch.tensor(values), dims=dims, is_masked=True)  # type: ignore[arg-type]
        steps.append(replace(STEP, more=[more]))
    for side, step in zip(("baseline", "candidate"), steps, strict=True):
        save_content_run(tmp_path / side, step)
    return compare_paths(tmp_path / "baseline", tmp_path / "candidate").verdict


def test_rows_known_by_their_identities_alone_are_noted(tmp_path: Path) -> None:
    kinds = tuple(kind for kind in KINDS if kind != "input")
    save_content_run(tmp_path / "baseline", STEP, kinds=kinds)
    save_content_run(tmp_path / "candidate", STEP, DP2, kinds=kinds)
    verdict = compare_paths(tmp_path / "baseline", tmp_path / "candidate").verdict
    assert verdict.kind is VerdictKind.IDENTICAL
    assert verdict.tensors is not None
    assert list(map(describe_note, verdict.tensors.notes)) == [
        "no input (tokens, labels, loss_mask) is in both traces, so rows are known to be the same by their identities "
        "alone: add input to trace.kinds"
    ]


def test_a_metric_of_any_training_is_compared(tmp_path: Path) -> None:
    verdict = compare(tmp_path, loss=2.75)
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == ("metric", "loss")


def test_nothing_trained_is_said_without_rewards(tmp_path: Path) -> None:
    idle = replace(STEP, gradient=torch.zeros(6))
    save_content_run(tmp_path / "baseline", idle)
    save_content_run(tmp_path / "candidate", idle, DP2)
    verdict = compare_paths(tmp_path / "baseline", tmp_path / "candidate").verdict
    assert verdict.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(verdict) == (
        "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on rows with "
        "a loss: tokens that the loss mask keeps"
    )


def test_traces_by_themselves_are_compared_as_runs_are(tmp_path: Path) -> None:
    ours = save_content_trace(tmp_path / "a", STEP)
    theirs = save_content_trace(tmp_path / "b", STEP, DP2)
    less = save_content_trace(tmp_path / "c", without("ten"))
    assert compare_paths(ours, theirs).verdict.kind is VerdictKind.IDENTICAL
    assert isinstance(compare_paths(ours, less).verdict.why, OtherData)


def test_a_whole_trace_is_compared_with_sketches(tmp_path: Path) -> None:
    ours = save_content_trace(tmp_path / "a", STEP)
    theirs = save_content_trace(tmp_path / "b", STEP, DP2, level="sketch")
    changed = save_content_trace(tmp_path / "c", STEP.changed("ten", 0, 0, by=1.0), DP2, level="sketch")
    assert compare_paths(ours, theirs).verdict.kind is VerdictKind.IDENTICAL
    verdict = compare_paths(ours, changed, tolerance=["activation=1e-6"]).verdict
    assert verdict.first is not None
    assert verdict.first.place == (0, 0, "activation", HIDDEN)


def test_without_readable_traces_the_digests_of_batches_decide(tmp_path: Path) -> None:
    for name, batch in (("a", "b0"), ("b", "b1")):
        save_content_run(tmp_path / name, STEP, batch=batch)
        for file in (tmp_path / name / "trace").rglob("*.safetensors"):
            file.unlink()
    ours, theirs = (load_summary(name, tmp_path / name, elapsed_s=None) for name in "ab")
    verdict = judge_runs(ours, theirs, bounds=EXACT, is_deterministic=True)
    assert verdict.why == OtherRollouts(first_step=0, num_steps=1, num_shared=1)


# --- Noise and theory -------------------------------------------------------------------------------------------------


def perturbed(tmp_path: Path, seed: int, by: float, **more: object) -> Path:
    step = more.pop("step", STEP.changed("nine", 3, 2, by=by))
    losses: Mapping[str, torch.Tensor] = {name: values + by for name, values in STEP.loss.items()}
    step = replace(step, loss=losses)  # type: ignore[type-var]
    return save_content_run(tmp_path / f"noise-{seed}", step, perturbation=seed, loss=2.5 + by, **more)  # type: ignore[arg-type]


def test_noise_bounds_losses_and_metrics_of_any_training(tmp_path: Path) -> None:
    baseline = save_content_run(tmp_path / "baseline", STEP)
    runs = [perturbed(tmp_path, seed, by) for seed, by in ((1, 1e-3), (2, -2e-3), (3, 1.5e-3))]
    near = replace(STEP, loss={name: values + 1e-3 for name, values in STEP.loss.items()})
    far = replace(STEP, loss={name: values + 1.0 for name, values in STEP.loss.items()})
    save_content_run(tmp_path / "near", near, DP2, loss=2.501)
    save_content_run(tmp_path / "far", far, DP2, loss=3.5)
    verdicts = {name: compare_paths(baseline, tmp_path / name, noise=runs).verdict for name in ("near", "far")}
    assert verdicts["near"].kind in (VerdictKind.ROUNDING, VerdictKind.SUSPECT)
    assert verdicts["far"].kind is VerdictKind.DIVERGED
    first = verdicts["far"].first
    assert first is not None
    assert first.place == (0, 0, "loss", LOSS)


def test_theory_bounds_losses_of_any_training(tmp_path: Path) -> None:
    far = replace(STEP, loss={name: values + 1.0 for name, values in STEP.loss.items()})
    baseline = save_content_run(tmp_path / "baseline", STEP)
    verdict = compare_paths(baseline, save_content_run(tmp_path / "far", far, DP2)).verdict
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.first is not None
    assert verdict.first.place == (0, 0, "loss", LOSS)


def test_noise_is_not_measured_from_other_rows_or_tokens(tmp_path: Path) -> None:
    baseline = save_content_run(tmp_path / "baseline", STEP)
    less = perturbed(tmp_path, 1, 0.0, step=without("ten"))
    other = perturbed(tmp_path, 2, 0.0, step=replace(STEP, tokens={**TOKENS, "nine": [9, 1, 2, 3, 5]}))
    with pytest.raises(AlignmentError, match="other rows of step 0; give it the same rows"):
        measure_noise(baseline, [less], seeds=[1])
    with pytest.raises(AlignmentError, match="other tokens of row nine at step 0; give it the same rows"):
        measure_noise(baseline, [other], seeds=[2])


def test_noise_of_other_batches_is_refused(tmp_path: Path) -> None:
    baseline = save_content_run(tmp_path / "baseline", STEP)
    candidate = save_content_run(tmp_path / "candidate", STEP, DP2)
    with pytest.raises(ConfigError, match="replay its recording, or give it the same rows"):
        compare_paths(baseline, candidate, noise=[perturbed(tmp_path, 1, 0.0, batch="b1")])


# --- Consequence ------------------------------------------------------------------------------------------------------


def no_clip(path: Path) -> ClipRule:
    return ClipRule(low=0.0, high=0.0, has_clip=False)


@pytest.mark.parametrize("level", ["full", "sketch"])
def test_the_consequence_says_what_can_be_said_without_a_policy(tmp_path: Path, level: str) -> None:
    turned = replace(STEP, gradient=STEP.gradient.flip(0))
    save_content_run(tmp_path / "baseline", STEP, level=level)  # type: ignore[arg-type]
    save_content_run(tmp_path / "candidate", turned, DP2, level=level)  # type: ignore[arg-type]
    found = find_consequence(tmp_path / "baseline", tmp_path / "candidate", load_clip_rule=no_clip)
    assert not found.has_policy
    text = describe_consequence(found)
    if level == "full":
        # 1·6 + 2·5 + 3·4 twice, of 91.
        assert found.update_cosine == (pytest.approx(56 / 91, rel=1e-6),)
        assert text == ("The model's one update points where the baseline's does to a cosine of 0.6154 (just as long).")
        assert [label for label, _ in consequence_rows(found, limit=3)] == ["cosine of the update"]
    else:
        assert text == (
            "Not computed: the update's direction; run both with trace.level=full trace.kinds=[initial,parameter]."
        )


def test_a_policy_in_an_attached_training_has_its_figures(tmp_path: Path) -> None:
    start = virtual_start("eight")
    spec = ShardSpec(
        name="logprobs",
        global_shape=(VIRTUAL_TOKENS,),
        local_shape=(2,),
        splits=(Split(dim=0, blocks=blocks_of_indices([start, start + 1])),),
    )
    more = TraceEntry(update=0, kind="output", spec=spec, tensor=torch.zeros(2), dims=("token",), is_masked=True)
    step = replace(STEP, more=[more])
    for name in ("baseline", "candidate"):
        save_content_run(tmp_path / name, step)
    found = find_consequence(tmp_path / "baseline", tmp_path / "candidate", load_clip_rule=no_clip)
    assert (found.has_policy, found.num_tokens) == (True, 2)


def test_the_json_of_other_data_names_the_finding(tmp_path: Path) -> None:
    why = json.loads(json.dumps(verdict_to_json(compare(tmp_path, step=without("nine"), ranks=None))))["why"]
    assert why["name"] == "OtherData"
    assert "nine" in json.dumps(why)
