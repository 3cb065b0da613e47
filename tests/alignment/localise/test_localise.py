"""Localisation with simulated runs: each planted fault is found at its step and place, and told from the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.alignment.localise.decisions import GraftWalk, build_localisation, find_differing
from mock_scheduler.alignment.localise.localise import localise
from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, StatedBounds
from mock_scheduler.comparison.findings import Finding, OnlyIn
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.errors import AlignmentError
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.localisation import GraftedModule, Localisation
from mock_scheduler.verdict.wording.localisation import compare_command, describe_localisation, describe_module
from tests.alignment.simulated import Fault, Runs, planned

FC1 = "decoder.layers.1.mlp.linear_fc1"
FC2 = "decoder.layers.0.mlp.linear_fc2"
NORM = "decoder.layers.0.input_layernorm"
STAGES = ["sketches-reference", "sketches-candidate", "full-reference", "full-candidate"]
EQUAL_UP_TO = "every other tensor equal"


def first_at(step: int) -> Divergence:
    """What the comparison that came before said."""
    finding = Finding(kind="gradient", step=step, update=0, name="w", fact=OnlyIn(side="baseline"))
    return Divergence(step=step, update=0, kind="gradient", name="w", evidence=finding)


def find(
    folder: Path,
    fault: Fault,
    *,
    runs: Runs | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Runs, Localisation]:
    """The localisation of a fault, and the runs that it took."""
    runs = runs or Runs(folder=folder, fault=fault)
    sides = (planned(name, folder, **(config or {})) for name in ("baseline", "candidate"))
    return runs, localise(*sides, **{"first": None, "run": runs, **options})


def names(modules: tuple[GraftedModule, ...]) -> list[str]:
    return [module.name for module in modules]


def test_one_cause_in_the_forward_pass_is_told_from_what_passes_it_on(tmp_path: Path) -> None:
    """The log-probabilities before the update differ too, and stand first in the order: they are of the same pass."""
    runs, found = find(tmp_path, Fault(first_step=2, forward={FC1: 1.01}))
    assert (found.step, found.update, found.phase, found.name) == (2, 0, "forward", FC1)
    assert describe_localisation(found) == (
        f"step 2, forward, {FC1} output: candidate is 1.010 times the baseline; the 13 tensors before it are equal; "
        "with the reference's activations in the place of it, the 4 other tensors of the pass that differed are equal: "
        "they pass it on"
    )
    assert runs.names() == [*STAGES, "graft-1"]
    assert names(found.causes) == [FC1]
    assert (found.causes[0].kind, found.causes[0].is_cause) == ("activation", True)
    assert names(found.amplifiers) == [
        "decoder.layers.1.mlp.linear_fc2",
        "decoder.layers.1",
        "output_layer",
        "logprobs",
    ]
    assert not any(module.is_cause for module in found.amplifiers)
    traces = tuple(tmp_path / f"localise-candidate-full-{side}" / "trace" for side in ("reference", "candidate"))
    assert found.trace_dirs == traces
    assert compare_command(found) == f"mock-scheduler compare {traces[0]} {traces[1]} --steps 2"
    assert found.seconds > 0


def test_two_causes_in_the_forward_pass_are_both_named(tmp_path: Path) -> None:
    runs, found = find(tmp_path, Fault(forward={FC2: 1.01, FC1: 1.02}), first=first_at(0))
    assert names(found.causes) == [FC2, FC1]
    assert runs.made["localise-candidate-graft-2"]["graft.names"] == [FC2, FC1]
    assert describe_localisation(found).startswith(
        f"step 0, forward, 2 causes: {FC2} output (candidate is 1.010 times the baseline) and {FC1} output (candidate "
        "is 1.020 times the baseline); "
    )
    assert describe_localisation(found).endswith(
        "the 6 other tensors of the pass that differed are equal: they pass it on"
    )
    assert describe_module(found.causes[1], found, is_first=False) == (
        "candidate is 1.020 times the baseline; all before it is equal with the causes before it put right, and with "
        "the reference's tensor in its place 4 tensors behind it are"
    )
    passed_on = {module.name: describe_module(module, found) for module in found.amplifiers}
    assert passed_on["decoder.layers.1.input_layernorm"].startswith(f"only passes on what {FC2} does: ")
    assert passed_on["output_layer"].startswith(f"only passes on what {FC1} does: ")


def test_every_module_of_a_kind_is_one_cause(tmp_path: Path) -> None:
    """A wrong norm was told as five causes, one for each of its instances."""
    last = "decoder.layers.1.input_layernorm"
    _, found = find(tmp_path, Fault(forward={NORM: 1.01, last: 1.01}), first=first_at(0))
    assert (names(found.causes), found.num_alike) == ([NORM, last], 2)
    assert describe_localisation(found).startswith(
        f"step 0, forward, every norm (2), each by itself, first {NORM} output: candidate is 1.010 times the baseline; "
    )


def test_modules_of_a_kind_beyond_the_grafts_are_counted(tmp_path: Path) -> None:
    last = "decoder.layers.1.input_layernorm"
    fault = Fault(forward={FC2: 1.01, FC1: 1.02, "output_layer": 1.03})
    _, found = find(tmp_path, fault, first=first_at(0), max_grafts=2)
    assert describe_localisation(found).startswith(
        f"step 0, forward, 2 of 5 linear layers, each by itself, first {FC2} output: "
    )
    _, found = find(tmp_path / "two", Fault(forward={FC2: 1.01, FC1: 1.02, last: 1.01}), first=first_at(0))
    assert found.num_alike == 0


def test_a_cause_in_the_backward_pass_alone_is_found_by_grafts_of_gradients(tmp_path: Path) -> None:
    runs, found = find(tmp_path, Fault(first_step=1, backward={FC1: 1.5}))
    assert (found.step, found.phase, found.name) == (1, "backward", FC1)
    assert describe_localisation(found) == (
        f"step 1, backward, {FC1} gradient at its output: candidate is 1.5 times the baseline (relative difference "
        "0.5), made by the backward pass behind decoder.layers.1.mlp.linear_fc2; the 22 tensors before it are equal; "
        "with the reference's activation gradients in the place of it, the 6 other tensors of the pass that differed "
        "are equal: they pass it on"
    )
    assert runs.made["localise-candidate-graft-1"]["graft.kind"] == "activation_gradient"
    assert names(found.causes) == [FC1]
    assert found.causes[0].kind == "activation_gradient"
    assert (
        describe_module(found.amplifiers[0], found) == f"only passes on what {FC1} does: 0.5, as it is"
    )  # a product with a matrix
    assert describe_module(found.amplifiers[1], found).endswith(
        " times its relative difference"
    )  # a sum with what is equal
    assert names(found.amplifiers)[-1] == "embedding"


def test_two_causes_in_the_backward_pass_are_both_named(tmp_path: Path) -> None:
    _, found = find(tmp_path, Fault(backward={FC1: 1.5, NORM: 0.5}))
    assert (names(found.causes), found.num_alike) == ([FC1, NORM], 0)
    assert names(found.amplifiers)[-1] == "embedding"
    made_by = ["decoder.layers.1.mlp.linear_fc2", "decoder.layers.0.mlp.linear_fc1"]
    assert [cause.made_by for cause in found.causes] == made_by
    assert describe_localisation(found).startswith("step 0, backward, 2 causes, each made behind a linear layer: ")
    assert f", made by the backward pass behind {made_by[1]}); " in describe_localisation(found)
    assert f", made by the backward pass behind {made_by[1]}; all before" in describe_module(found.causes[1], found)


def test_a_reduction_fault_behind_a_backward_fault_is_named_beside_it(tmp_path: Path) -> None:
    runs = Runs(folder=tmp_path, fault=Fault(backward={FC1: 1.5}, unsummed=True), num_ranks=2)
    _, found = find(tmp_path, runs.fault, runs=runs)
    assert names(found.causes) == [FC1]
    assert (
        f"; then gradients of {NORM}.weight, decoder.layers.1.input_layernorm.weight still differ, not summed over tp: "
        "each tp rank holds its own part, and their sum is the baseline: their own reduction"
    ) in describe_localisation(found)


def test_gradients_that_alone_differ_are_a_fault_of_their_reduction(tmp_path: Path) -> None:
    runs = Runs(folder=tmp_path, fault=Fault(first_step=3, unsummed=True), num_ranks=2)
    _, found = find(tmp_path, runs.fault, runs=runs)
    assert (found.step, found.phase, found.name) == (3, "backward", f"{NORM}.weight")
    assert describe_localisation(found) == (
        f"step 3, backward, {NORM}.weight gradient: not summed over tp: each tp rank holds its own part, and their sum "
        "is the baseline; so is 1 other: decoder.layers.1.input_layernorm.weight; every other tensor equal (34 up to "
        "the end of that pass); 2 later tensors follow from it"
    )
    assert runs.names() == STAGES  # no graft says more
    assert (found.causes, found.amplifiers) == ((), ())


def test_parameters_that_alone_differ_are_a_fault_of_the_optimizer(tmp_path: Path) -> None:
    runs, found = find(tmp_path, Fault(first_step=1, decay=0.999))
    assert (found.step, found.phase, found.name) == (1, "update", f"{NORM}.weight")
    assert describe_localisation(found).startswith(
        f"step 1, update, {NORM}.weight parameter: of the change by the update: "
    )
    assert f"{EQUAL_UP_TO} (36 up to the end of that pass)" in describe_localisation(found)
    assert runs.names() == STAGES


@pytest.mark.parametrize("more", [{}, {"max_trace_bytes": 1}])
def test_tokens_that_no_rank_holds_are_no_fault_of_the_module_that_shows_it_first(
    tmp_path: Path, more: dict[str, int]
) -> None:
    runs = Runs(folder=tmp_path, fault=Fault(same_rows=True), num_ranks=2)
    runs, found = find(tmp_path, runs.fault, runs=runs, **more)
    assert describe_localisation(found).endswith(
        "; no graft: tokens of embedding are held by no rank, so there is nothing in whose place the reference's could "
        "be put; the cause lies in which rows the ranks were given, not in a module"
    )
    assert runs.names() == STAGES
    assert not found.causes


def test_scores_that_alone_differ_are_no_fault_of_the_update(tmp_path: Path) -> None:
    runs, found = find(tmp_path, Fault(scores=0.99), first=first_at(0))
    assert (found.phase, found.name) == ("scores", "old_logprobs")
    assert describe_localisation(found) == (
        "step 0, scores, old_logprobs before the first update: candidate is 0.99 times the baseline (relative "
        "difference 0.01); every other tensor equal (11 up to the end of that pass)"
    )
    assert not any("graft" in name for name in runs.names())


def test_what_differs_in_a_later_update_is_no_part_of_the_pass(tmp_path: Path) -> None:
    """Labels are shifted: the log-probabilities of update 0 differ alone in their pass, all of update 1 follows."""
    places = (("activation", 0, "embedding"), ("output", 0, "logprobs"), ("activation", 1, "embedding"))
    differences = tuple(
        TensorDifference(
            key=TraceKey(step=0, update=update, kind=kind, name=name),
            num_elements=4,
            bit_equal=(update, name) == (0, "embedding"),
            max_abs=0.1,
            relative=0.1,
            tolerance=0.0,
        )
        for kind, update, name in places
    )
    comparison = TensorComparison(
        steps=(0,), differences=differences, findings=(), baseline_conflicts=(), candidate_conflicts=()
    )
    differing = find_differing(comparison, is_exact=True)
    walk = GraftWalk(before=differing[:1], max_runs=4)
    assert walk.next_names() == ()
    found = build_localisation(
        differing[0],
        differing,
        comparison,
        walk=walk,
        reductions=(),
        is_exact=True,
        trace_dirs=(tmp_path / "a", tmp_path / "b"),
        seconds=0.0,
    )
    assert describe_localisation(found) == (
        "step 0, forward, logprobs: differs by 0.1; every other tensor equal (1 up to the end of that pass); 1 later "
        "tensor follows from it"
    )


def test_one_pair_of_sketched_runs_gives_the_step_and_ends_where_the_runs_are_known_to_differ(tmp_path: Path) -> None:
    runs, found = find(tmp_path, Fault(first_step=1, forward={FC1: 1.01}), first=first_at(2))
    assert found.step == 1
    sketches, full = (runs.made[f"localise-candidate-{stage}-candidate"] for stage in ("sketches", "full"))
    assert (sketches["trace.level"], sketches["trace.steps"], sketches["max_steps"]) == ("sketch", "0-2", 3)
    assert (full["trace.level"], full["trace.steps"], full["max_steps"]) == ("full", "1", 2)
    assert full["rollout_mock.mode"] == "mock"


def test_a_run_whose_length_its_rate_follows_from_is_not_shortened(tmp_path: Path) -> None:
    config = {"training": {"lr_decay_style": "linear", "min_lr": 0.0}}
    runs, _ = find(tmp_path, Fault(first_step=1, forward={FC1: 1.01}), config=config, first=first_at(1))
    assert [values for values in runs.made.values() if "max_steps" in values] == []


def test_a_step_that_is_too_large_is_traced_whole_in_its_first_differing_names_alone(tmp_path: Path) -> None:
    """Grafts are then judged by sketches, which tell equal bits as well."""
    runs, found = find(tmp_path, Fault(forward={FC2: 1.01, FC1: 1.02}), first=first_at(0), max_trace_bytes=1)
    assert runs.names() == [*STAGES, "graft-1", "graft-2"]
    whole = runs.made["localise-candidate-full-reference"]["trace.patterns"]
    assert whole == [
        *(FC2, "decoder.layers.0", "decoder.layers.1.input_layernorm", FC1, "decoder.layers.1.mlp.linear_fc2"),
        *("decoder.layers.1", "output_layer", "logprobs"),
    ]
    assert runs.made["localise-candidate-graft-1"]["trace.level"] == "sketch"
    assert names(found.causes) == [FC2, FC1]
    assert "(candidate is 1.010 times the baseline)" in describe_localisation(found)
    assert "the 6 other tensors of the pass that differed are equal" in describe_localisation(found)


def test_no_more_grafts_are_made_than_allowed_and_the_sentence_says_so(tmp_path: Path) -> None:
    _, found = find(tmp_path, Fault(forward={FC2: 1.01, FC1: 1.02}), first=first_at(0), max_grafts=1)
    assert names(found.causes) == [FC2]
    assert (
        f"{FC1}, decoder.layers.1.mlp.linear_fc2, decoder.layers.1, and 2 more still differ: no further run was made "
        f"after 1; the next cause would be {FC1}"
    ) in describe_localisation(found)


def test_a_graft_that_fails_leaves_what_was_found_before_it(tmp_path: Path) -> None:
    runs = Runs(folder=tmp_path, fault=Fault(forward={FC1: 1.01}), fails=("graft-1",))
    _, found = find(tmp_path, runs.fault, runs=runs)
    assert (found.phase, found.name, found.causes) == ("forward", FC1, ())
    assert describe_localisation(found).endswith(
        "; no graft: the graft could not be made: localise-candidate-graft-1 was told to fail"
    )


def test_a_difference_within_its_bounds_is_none(tmp_path: Path) -> None:
    """The bits differ from layer 0 on; the bounds leave layer 1 alone."""
    stated = ToleranceConfig(metric=1e-3, activation=1e-3, gradient=1e-3, update=1e-3)
    bounds = StatedBounds(tolerance=stated, otherwise=UNBOUNDED)
    fault = Fault(first_step=1, forward={FC2: 1.00001, FC1: 1.05})
    _, found = find(tmp_path, fault, bounds=bounds)
    assert (found.step, found.name) == (1, FC1)
    assert "tensors before it are within their bounds" in describe_localisation(found)
    assert names(found.causes) == [FC1]
    _, exact = find(tmp_path / "exact", fault)
    assert names(exact.causes) == [FC2, FC1]


def test_runs_that_do_not_differ_cannot_be_localised(tmp_path: Path) -> None:
    with pytest.raises(AlignmentError) as raised:
        find(tmp_path, Fault())
    assert str(raised.value) == (
        "candidate: the divergence cannot be localised: in sketches of every step no tensor differs from baseline by "
        "its bits"
    )
