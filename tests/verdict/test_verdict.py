"""The verdict and its reason, from finished runs on disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.compare_runs import compare_runs
from mock_scheduler.verdict.verdict import Verdict, VerdictKind, worst_exit_code
from mock_scheduler.verdict.wording.divergences import describe_evidence
from mock_scheduler.verdict.wording.verdicts import describe_reason, describe_sentence
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

BOUNDS = stated()
NORM = "decoder.layers.0.input_layernorm.weight"
Tensors = Mapping[TraceKind, torch.Tensor]
SAME: Tensors = {"initial": torch.zeros(4), "gradient": torch.ones(4), "parameter": torch.ones(4)}


def write_run(run_dir: Path, *, ranks: tuple[Tensors, ...] = (SAME,), losses: tuple[float, ...] = (1.0,)) -> Path:
    """A run whose every rank holds the same norm weight whole; one value of pg_loss per step."""
    for step in range(len(losses)):
        for rank, tensors in enumerate(ranks):
            entries = [
                TraceEntry(update=0, kind=kind, spec=whole(NORM, (4,)), tensor=tensors[kind])
                for kind in TRACE_KINDS
                if kind in tensors
            ]
            save_rank_trace(
                run_dir / "trace",
                step=step,
                global_rank=rank,
                world_size=len(ranks),
                coordinates={"tp": rank, "pp": 0, "dp": 0},
                entries=entries,
            )
    rows = [json.dumps({"step": step, "metrics": {"pg_loss": loss}}) for step, loss in enumerate(losses)]
    (run_dir / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return run_dir


def align(baseline: Path, candidate: Path) -> Verdict:
    return compare_runs(baseline, candidate, bounds=BOUNDS)


def test_bit_equal_runs_are_identical(tmp_path: Path) -> None:
    alignment = align(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert alignment.kind is VerdictKind.IDENTICAL
    assert describe_reason(alignment) == (
        "bit-equal: 1 metric over 1 step, 1 gradient, 1 parameter; one changed bit would have been found"
    )


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"pg_loss": 0.0}, "the policy's loss is exactly 0"),
        ({"advantage_min": 0.0, "advantage_max": -0.0}, "every advantage is exactly 0"),
        (
            {"grad_norm": 0.0, "pg_loss": 0.0, "advantage_min": 0.0, "advantage_max": 0.0},
            "every advantage, the policy's",
        ),
        ({"advantage_min": 0.0, "advantage_max": 0.5, "pg_loss": 1e-30}, ""),
    ],
)
def test_what_was_0_throughout_is_said_where_the_verdict_stands(
    tmp_path: Path, metrics: dict[str, float], words: str
) -> None:
    """Advantages that are all 0 once hid every error of the loss behind "one changed bit would have been found"."""
    for name in ("a", "b"):
        write_run(tmp_path / name)
        rows = [json.dumps({"step": step, "metrics": metrics}) for step in (0, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    reason = describe_reason(align(tmp_path / "a", tmp_path / "b"))
    assert (words in reason and "in every step, so that an error there could not show" in reason) == bool(words)
    assert ("exactly 0" in reason) == bool(words)


def test_one_flipped_bit_is_rounding_and_no_longer_identical(tmp_path: Path) -> None:
    flipped = torch.ones(4)
    flipped.view(torch.int32)[1] ^= 1
    candidate = write_run(tmp_path / "b", ranks=({**SAME, "parameter": flipped},))
    alignment = align(write_run(tmp_path / "a"), candidate)
    assert alignment.kind is VerdictKind.ROUNDING
    assert describe_reason(alignment) == (
        "within the stated bounds: 1 metric over 1 step, 1 gradient, 1 parameter (0 bit-equal); nearest to its bound: "
        "parameter of decoder.layers.0.input_layernorm.weight at step 0, update 0, 5.96e-08, 83,888 times below 0.005; "
        "a divergence would have been any relative error above 0.0001 of gradients; 0.005 of parameters"
    )


def test_the_worst_difference_is_named_with_its_margin_and_what_had_no_say(tmp_path: Path) -> None:
    gradient, parameter = torch.ones(4), torch.ones(4)
    gradient[0] += 2.0**-14
    parameter[0], parameter[1] = 1.0 + 2.0**-9, 3.0
    noise = torch.tensor([1.0, 0.0, 1.0, 1.0])
    candidate = write_run(
        tmp_path / "b", ranks=({"initial": torch.zeros(4), "gradient": gradient * noise, "parameter": parameter},)
    )
    small = {**SAME, "gradient": torch.tensor([1.0, 2.0**-20, 1.0, 1.0])}
    alignment = align(write_run(tmp_path / "a", ranks=(small,)), candidate)
    assert alignment.kind is VerdictKind.ROUNDING
    # 2**-14 of gradients of norm sqrt(3); 2**-9, less the rounding sqrt(3)·2**-23, of a change of norm sqrt(3).
    assert describe_reason(alignment) == (
        "within the stated bounds: 1 metric over 1 step, 1 gradient (0 bit-equal), 1 parameter (0 bit-equal; 25.00% of "
        "elements left out); nearest to its bound: gradient of decoder.layers.0.input_layernorm.weight at step 0, "
        "update 0, 3.52e-05, 2.9 times below 0.0001; a divergence would have been any relative error above 0.0001 of "
        "gradients; 0.005 of parameters"
    )


def test_a_run_that_trains_nothing_is_no_comparison(tmp_path: Path) -> None:
    """Without reward there is no gradient, and a frozen optimizer was identical to a healthy one."""
    idle: Tensors = {"initial": torch.ones(4), "gradient": torch.zeros(4), "parameter": torch.ones(4)}
    alignment = align(write_run(tmp_path / "a", ranks=(idle,)), write_run(tmp_path / "b", ranks=(idle,)))
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(alignment) == (
        "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on rollouts "
        "whose rewards differ within a group, or with an entropy or KL term"
    )
    frozen = {**idle, "gradient": torch.ones(4)}
    alignment = align(write_run(tmp_path / "c", ranks=(frozen,)), write_run(tmp_path / "d", ranks=(frozen,)))
    assert describe_reason(alignment).startswith("nothing was trained: no update of the baseline changed a parameter")


def test_two_broken_runs_are_no_comparison_and_one_is_diverged(tmp_path: Path) -> None:
    broken: Tensors = {**SAME, "gradient": torch.full((4,), float("nan"))}
    both = align(write_run(tmp_path / "a", ranks=(broken,)), write_run(tmp_path / "b", ranks=(broken,)))
    assert both.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(both) == (
        "both runs are broken, so neither is a reference: gradient of decoder.layers.0.input_layernorm.weight at step "
        "0, update 0 has NaN in 4 of 4 elements in both runs"
    )
    one = align(write_run(tmp_path / "c"), write_run(tmp_path / "d", ranks=(broken,)))
    assert one.kind is VerdictKind.DIVERGED


def test_corrupt_gradients_with_equal_losses_are_diverged_and_named(tmp_path: Path) -> None:
    candidate = write_run(tmp_path / "b", ranks=({**SAME, "gradient": torch.full((4,), 1.5)},))
    alignment = align(write_run(tmp_path / "a"), candidate)
    assert alignment.kind is VerdictKind.DIVERGED
    assert describe_reason(alignment) == (
        "first divergence: step 0, update 0, backward: gradient of decoder.layers.0.input_layernorm.weight differs by "
        "0.5 (bound 0.0001): largest at index [0], held by global rank 0 (dp0 pp0 tp0) in both runs; it is the first "
        "tensor that was compared; beyond the stated bounds: 0 of 1 metric, 1 of 2 tensors"
    )
    assert describe_reason(alignment).startswith(
        f"first divergence: {describe_sentence(alignment)}; beyond the stated bounds"
    )
    first = alignment.first
    assert first is not None
    assert (first.step, first.update, first.kind, first.name, first.value) == (0, 0, "gradient", NORM, 0.5)


def test_replicas_that_disagree_make_it_diverged_and_name_axis_and_ranks(tmp_path: Path) -> None:
    other = torch.ones(4)
    other.view(torch.int32)[0] ^= 1
    candidate = write_run(tmp_path / "b", ranks=(SAME, {**SAME, "gradient": other}))
    alignment = align(write_run(tmp_path / "a"), candidate)
    assert alignment.kind is VerdictKind.DIVERGED
    assert alignment.first is not None
    assert describe_evidence(alignment.first) == (
        "copies within the candidate differ: decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold different "
        "gradients at step 0 (1 element, by up to 1.19e-07)"
    )


def test_replicas_that_disagree_in_both_runs_are_diverged(tmp_path: Path) -> None:
    """A conflict that the baseline had too was forgiven, and with it a far larger one in the candidate."""
    ranks = (SAME, {**SAME, "gradient": torch.full((4,), 2.0)})
    alignment = align(write_run(tmp_path / "a", ranks=ranks), write_run(tmp_path / "b", ranks=ranks))
    assert alignment.kind is VerdictKind.DIVERGED
    assert (
        "copies within the candidate differ: decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1"
        in describe_reason(alignment)
    )


def test_a_baseline_whose_replicas_disagree_is_no_reference(tmp_path: Path) -> None:
    ranks = (SAME, {**SAME, "gradient": torch.full((4,), 2.0)})
    alignment = align(write_run(tmp_path / "a", ranks=ranks), write_run(tmp_path / "b"))
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(alignment) == (
        "replicas disagree in the baseline, so it is no reference: decoder.layers.0.input_layernorm.weight: ranks tp0 "
        "and tp1 hold different gradients at step 0 (4 elements, by up to 1)"
    )


def test_a_difference_that_grew_from_update_to_update_is_said_to_have_grown(tmp_path: Path) -> None:
    for side in "ab":
        for step, difference in enumerate((1e-6, 1e-5, 9e-5, 5e-4)):
            gradient = torch.full((4,), 1.0 + (difference if side == "b" else 0.0))
            values = {**SAME, "gradient": gradient}
            entries = [TraceEntry(update=0, kind=kind, spec=whole(NORM, (4,)), tensor=values[kind]) for kind in SAME]
            save_rank_trace(
                tmp_path / side / "trace", step=step, global_rank=0, world_size=1, coordinates={}, entries=entries
            )
        rows = [json.dumps({"step": step, "metrics": {"pg_loss": 1.0}}) for step in range(4)]
        (tmp_path / side / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    alignment = align(tmp_path / "a", tmp_path / "b")
    assert alignment.kind is VerdictKind.DIVERGED
    assert describe_reason(alignment).endswith(
        "it grew over the updates before, as rounding does that training amplifies; to tell it from a fault, align "
        "fewer steps"
    )


def test_the_earliest_step_is_the_first_divergence_and_metrics_are_named(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "a", losses=(1.0, 1.0, 1.0))
    alignment = align(baseline, write_run(tmp_path / "b", losses=(1.0, 1.5, 3.0)))
    assert alignment.kind is VerdictKind.DIVERGED
    assert describe_reason(alignment) == (
        "first divergence: pg_loss from step 1 on: relative difference up to 0.667, |a-b| 6.67e+03 times "
        "its bound of 0.0003 at step 2; "
        "beyond the stated bounds: 1 of 1 metric, 0 of 6 tensors"
    )


def test_within_a_step_tensors_come_before_metrics(tmp_path: Path) -> None:
    wrong: Tensors = {**SAME, "gradient": torch.full((4,), 2.0), "parameter": torch.full((4,), 2.0)}
    baseline = write_run(tmp_path / "a")
    both = align(baseline, write_run(tmp_path / "b", ranks=(wrong,), losses=(2.0,)))
    late = align(baseline, write_run(tmp_path / "c", ranks=({**wrong, "gradient": torch.ones(4)},), losses=(2.0,)))
    assert [alignment.first and alignment.first.kind for alignment in (both, late)] == [
        "gradient",
        "parameter",
    ]
    assert (
        "first metric: pg_loss from step 0 on: relative difference up to 0.5, |a-b| 5e+03 times its bound of 0.0002"
        in describe_reason(both)
    )


def test_a_counter_of_one_side_alone_stands_behind_the_tensors(tmp_path: Path) -> None:
    """A counter that recomputation alone took was said to be the first divergence of a wrong parameter."""
    wrong: Tensors = {**SAME, "parameter": torch.full((4,), 2.0)}
    candidate = write_run(tmp_path / "b", ranks=(wrong,))
    (candidate / "metrics.jsonl").write_text('{"step": 0, "metrics": {"pg_loss": 1.0, "num_recomputed": 4.0}}\n')
    first = align(write_run(tmp_path / "a"), candidate).first
    assert first is not None
    assert (first.kind, first.name) == ("parameter", NORM)
    # Where no tensor differs, it is what there is to say.
    same = write_run(tmp_path / "c")
    (same / "metrics.jsonl").write_text('{"step": 0, "metrics": {"pg_loss": 1.0, "num_recomputed": 4.0}}\n')
    alone = align(tmp_path / "a", same).first
    assert alone is not None
    assert (alone.kind, alone.name) == ("metric", "num_recomputed")


def test_a_norm_that_is_not_of_its_gradients_stands_before_what_it_clipped(tmp_path: Path) -> None:
    wrong: Tensors = {**SAME, "parameter": torch.full((4,), 2.0)}
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b", ranks=(wrong,))
    norm = float(SAME["gradient"].norm())
    for folder, value in zip(folders, (norm, 1.1 * norm), strict=True):
        (folder / "metrics.jsonl").write_text(f'{{"step": 0, "metrics": {{"pg_loss": 1.0, "grad_norm": {value}}}}}\n')
    verdict = align(*folders)
    assert (verdict.kind, str(verdict.first)) == (VerdictKind.DIVERGED, "metric grad_norm at step 0")


def test_nan_against_a_number_is_diverged(tmp_path: Path) -> None:
    alignment = align(write_run(tmp_path / "a"), write_run(tmp_path / "b", losses=(float("nan"),)))
    assert alignment.kind is VerdictKind.DIVERGED


def test_equal_metrics_without_gradients_prove_nothing(tmp_path: Path) -> None:
    only: tuple[Tensors, ...] = ({"initial": torch.zeros(4), "parameter": torch.ones(4)},)
    alignment = align(write_run(tmp_path / "a", ranks=only), write_run(tmp_path / "b", ranks=only))
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(alignment) == "no gradient was compared: the rest proves nothing"


def test_nothing_compared_at_all_is_incomparable(tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "a", ranks=({},))
    candidate = write_run(tmp_path / "b", ranks=({},))
    for run_dir in (baseline, candidate):
        (run_dir / "metrics.jsonl").write_text("")
    alignment = align(baseline, candidate)
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert (
        describe_reason(alignment) == "no metric and no gradient and no parameter was compared: the rest proves nothing"
    )


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([VerdictKind.IDENTICAL, VerdictKind.ROUNDING], 0),
        ([VerdictKind.UNVERIFIED, VerdictKind.ROUNDING], 4),
        ([VerdictKind.UNVERIFIED, VerdictKind.INCOMPARABLE], 3),
        ([VerdictKind.INCOMPARABLE, VerdictKind.DIVERGED, VerdictKind.UNVERIFIED], 1),
    ],
)
def test_the_gravest_verdict_decides_the_exit_code(verdicts: list[VerdictKind], code: int) -> None:
    assert worst_exit_code(verdicts) == code
