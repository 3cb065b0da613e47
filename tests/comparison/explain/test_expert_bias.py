"""Updates of one step up or down: a sign that rounding turned is counted, and a wrong rule is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.bounds.bounds import EXACT, UNBOUNDED, Bounds
from mock_scheduler.comparison.explain.expert_bias import find_moved_experts, find_without_gradient, read_decisions
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.pairing.pairs import TracePair
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import RowTable, StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.consequence.update import UpdateDirections
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.verdicts import describe_reason, describe_sentence
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
BIAS = "decoder.layers.1.mlp.router.expert_bias"
CHOICE = "decoder.layers.1.mlp.router.chosen_experts"
RATE = 0.125
#: Of 8 experts, one of which has as many tokens as the mean.
SIGNS = (1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 1.0)
#: Update 1 of the same run.
LATER = (1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
#: Experts of 4 tokens.
TOKENS = ((0, 1), (2, 3), (4, 5), (6, 7))
BOUNDS = stated(gradient=1e-3, update=1e-4)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Two updates of a weight with a gradient and of a bias without. ``grows``: what update 1 adds to the gradient.

    signs: of both updates. choice: of update 0, which is not traced where it is ``None``. copy: the second rank's bias
    after update 0 in units of the rate, where it is another.
    """

    signs: tuple[Sequence[float], Sequence[float]] = (SIGNS, LATER)
    rate: float = RATE
    grows: float = 0.0
    choice: Sequence[Sequence[int]] | None = None
    copy: Sequence[float] | None = None

    def write(self, folder: Path) -> Path:
        """The trace of two dp ranks."""
        for rank in range(2):
            entries = [_entry("initial", WEIGHT, torch.ones(2, 3)), _entry("initial", BIAS, torch.zeros(8))]
            bias = torch.zeros(8)
            for update, signs in enumerate(self.signs):
                gradient = torch.full((2, 3), 2.0 + self.grows * update)
                bias = bias + self.rate * torch.tensor(signs)
                own = bias if self.copy is None or rank == 0 or update else self.rate * torch.tensor(self.copy)
                entries += [
                    _entry("gradient", WEIGHT, gradient, update=update),
                    _entry("parameter", WEIGHT, 1.0 - 0.25 * (update + 1) * torch.ones(2, 3), update=update),
                    _entry("parameter", BIAS, own, update=update),
                ]
            if self.choice is not None:
                entries.append(_entry("router", CHOICE, torch.tensor(self.choice)))
            footer = StepFooter(rows=RowTable(identities=("a",), lengths=(4,)), update_rows=((0,), (0,)), ranks=(0, 1))
            save_rank_trace(
                folder,
                step=0,
                global_rank=rank,
                world_size=2,
                coordinates={"dp": rank},
                entries=entries,
                footer=footer,
            )
        return folder


def _entry(kind: TraceKind, name: str, tensor: torch.Tensor, *, update: int = 0) -> TraceEntry:
    dims = {BIAS: ("expert",), CHOICE: ("token", "slot")}.get(name, ("row", "column"))
    return TraceEntry(update=update, kind=kind, spec=whole(name, tuple(tensor.shape)), tensor=tensor, dims=dims)  # type: ignore[arg-type]


def turned(*elements: int, signs: Sequence[float] = SIGNS) -> tuple[float, ...]:
    """The signs with some turned; 0 becomes 1."""
    return tuple((-sign or 1.0) if place in elements else sign for place, sign in enumerate(signs))


def compare(
    tmp_path: Path, candidate: Run, baseline: Run | None = None, *, bounds: Bounds = BOUNDS
) -> TensorComparison:
    ours = (baseline or Run()).write(tmp_path / "baseline")
    return compare_trace_folders(ours, candidate.write(tmp_path / "candidate"), bounds=bounds)


def judge(found: TensorComparison, bounds: Bounds = BOUNDS) -> Verdict:
    return decide(None, found, bounds=bounds)


def bias_of(found: TensorComparison, update: int = 0) -> TensorDifference:
    (item,) = (item for item in found.differences if (item.key.name, item.key.update) == (BIAS, update))
    return item


def test_what_a_step_traces_without_gradient_is_found_by_its_keys() -> None:
    key = TraceKey(step=0, update=0, kind="initial", name=WEIGHT)
    gradient = replace(key, kind="gradient")
    bias = replace(key, name=BIAS)
    assert find_without_gradient({key, gradient, bias}) == {BIAS}
    assert find_without_gradient({key, bias}) == frozenset()  # gradients were not traced: nothing is known


def test_experts_that_other_tokens_chose_are_found() -> None:
    """Token 1 went from expert 3 to 0; token 2 has the same experts."""
    mine, other = torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.tensor([[0, 1], [0, 2], [1, 2]])
    assert find_moved_experts(mine, other) == {0, 3}
    assert find_moved_experts(mine, mine) == frozenset()


def test_decisions_are_steps_of_one_size() -> None:
    """After 0.1 + 0.1 + 0.1 a step of 0.1 is off by rounding, as float32 stores it."""
    start = torch.zeros(3)
    for _ in range(3):
        start = start + torch.tensor(0.1)
    moved = start + 0.1 * torch.tensor([1.0, -1.0, 0.0])
    other = start + 0.1 * torch.tensor([1.0, 1.0, 0.0])
    found = read_decisions((start, start), (moved, other))
    assert found is not None
    assert (found.baseline.tolist(), found.candidate.tolist()) == ([1, -1, 0], [1, 1, 0])
    assert found.flipped.tolist() == [1]
    assert read_decisions((start, start), (moved, start + 0.11 * torch.tensor([1.0, -1.0, 0.0]))) is None
    assert read_decisions((start, start), (start, start)) is None


@pytest.mark.parametrize("elements", [(2,), (2, 6)])
def test_what_one_token_turns_is_counted_and_is_rounding(tmp_path: Path, elements: tuple[int, ...]) -> None:
    """A token that another expert got moves two counts; each sign may turn, or leave 0."""
    found = compare(tmp_path, Run(signs=(turned(*elements), LATER)))
    bias = bias_of(found)
    assert (bias.relative, bias.tolerance) == (len(elements) / 8, 2 / 8)
    assert (bias.num_decisions, bias.num_flipped_decisions, bias.exceeds) == (8, len(elements), False)
    alignment = judge(found)
    assert alignment.kind is VerdictKind.ROUNDING
    described = f"parameter of {BIAS} at step 0, update 0"
    assert f"rounding turned {len(elements)} of 8 decisions, first in {described}" in describe_reason(alignment)
    assert "0.0001 of parameters" in describe_reason(alignment)  # a bound of decisions is no relative error


def test_updates_behind_it_that_decide_alike_are_within_their_bounds(tmp_path: Path) -> None:
    later = bias_of(compare(tmp_path, Run(signs=(turned(2), LATER))), update=1)
    assert (later.bit_equal, later.relative, later.num_flipped_decisions) == (False, 0.0, 0)


def test_more_than_one_token_turns_is_a_divergence_with_its_name(tmp_path: Path) -> None:
    alignment = judge(compare(tmp_path, Run(signs=(turned(0, 1, 2), LATER))))
    assert alignment.kind is VerdictKind.DIVERGED
    assert alignment.first is not None
    assert (alignment.first.name, alignment.first.update) == (BIAS, 0)
    assert (alignment.first.value, alignment.first.bound) == (3 / 8, 2 / 8)


def test_a_rule_that_moves_the_other_way_is_a_divergence(tmp_path: Path) -> None:
    alignment = judge(compare(tmp_path, Run(signs=(tuple(-sign for sign in SIGNS), LATER))))
    assert alignment.kind is VerdictKind.DIVERGED
    assert f"parameter of {BIAS} differs by 0.875 (bound 0.25)" in describe_sentence(
        alignment
    )  # 7 of 8, as one stays at 0


def test_another_rate_is_judged_as_every_update(tmp_path: Path) -> None:
    found = compare(tmp_path, Run(rate=RATE * 1.25))
    bias = bias_of(found)
    assert (bias.num_decisions, bias.exceeds) == (0, True)
    assert bias.relative == 0.25
    assert f"parameter of {BIAS} differs by 0.25 (bound 0.0001)" in describe_sentence(judge(found))


def test_a_sign_turns_only_where_other_tokens_were_counted(tmp_path: Path) -> None:
    """Where choices were traced: expert 2 has the same tokens in both runs, so that its sign cannot have turned."""
    candidate = Run(signs=(turned(2), LATER), choice=TOKENS)
    found = compare(tmp_path, candidate, Run(choice=TOKENS))
    assert (bias_of(found).tolerance, bias_of(found).exceeds) == (0.0, True)
    assert judge(found).kind is VerdictKind.DIVERGED


def test_a_sign_may_turn_where_a_token_chose_another_expert(tmp_path: Path) -> None:
    """Token 1 went from expert 2 to expert 6: these two may turn, and no other."""
    other = (*TOKENS[:1], (3, 6), *TOKENS[2:])
    found = compare(tmp_path / "may", Run(signs=(turned(2, 6), LATER), choice=other), Run(choice=TOKENS))
    assert not bias_of(found).exceeds
    found = compare(tmp_path / "may not", Run(signs=(turned(2, 5), LATER), choice=other), Run(choice=TOKENS))
    assert bias_of(found).exceeds


def test_nothing_turns_where_all_must_be_equal_to_the_last_bit(tmp_path: Path) -> None:
    found = compare(tmp_path, Run(signs=(turned(2), LATER)), bounds=EXACT)
    assert (bias_of(found).exceeds, bias_of(found).num_decisions) == (True, 0)
    assert judge(found, EXACT).kind is VerdictKind.DIVERGED


def test_copies_that_decide_differently_are_a_divergence_however_few(tmp_path: Path) -> None:
    """Each dp rank moved its bias by its own tokens: the first one's copy is the baseline's."""
    alignment = judge(compare(tmp_path, Run(copy=turned(2))))
    assert alignment.kind is VerdictKind.DIVERGED
    assert f"{BIAS}: ranks dp0 and dp1 hold different parameters at step 0" in describe_sentence(alignment)


def test_what_is_beyond_its_bound_behind_a_turned_decision_is_suspect(tmp_path: Path) -> None:
    """The gradient of update 1 is 1 % larger: from another bias tokens go to other experts. Without one: diverged."""
    found = compare(tmp_path / "turned", Run(signs=(turned(2), LATER), grows=0.02))
    alignment = judge(found)
    assert alignment.kind is VerdictKind.SUSPECT
    assert describe_reason(alignment).startswith(
        "beyond an estimated bound only: first divergence: step 0, update 1, backward"
    )
    assert f"rounding turned 1 of 8 decisions, first in parameter of {BIAS} at step 0, update 0 before" in (
        describe_reason(alignment)
    )
    assert judge(compare(tmp_path / "equal", Run(grows=0.02))).kind is VerdictKind.DIVERGED


def test_a_gradient_beyond_its_bound_before_a_turned_decision_is_a_divergence(tmp_path: Path) -> None:
    later = turned(2, signs=LATER)
    assert judge(compare(tmp_path, Run(signs=(SIGNS, later), grows=0.02))).kind is VerdictKind.DIVERGED


def test_noise_of_decisions_is_the_largest_number_that_a_perturbed_run_turned(tmp_path: Path) -> None:
    """2 and 3 of 8 turned: 9 may. Of update 1, where none turned, two may."""
    baseline = Run().write(tmp_path / "noise" / "baseline")
    perturbed = [
        Run(signs=(turned(*range(2 + number)), LATER)).write(tmp_path / "noise" / str(number)) for number in range(2)
    ]
    noise = measure_noise(baseline, perturbed, seeds=(1, 2))
    key = TraceKey(step=0, update=0, kind="parameter", name=BIAS)
    assert noise.tensors[key].relative == (2 / 8, 3 / 8)
    found = compare(tmp_path, Run(signs=(turned(0, 1, 2, 3), turned(0, signs=LATER))), bounds=noise)
    assert (bias_of(found).relative, bias_of(found).tolerance) == (4 / 8, 9 / 8)
    assert (bias_of(found, 1).relative, bias_of(found, 1).tolerance) == (1 / 8, 2 / 8)


def test_noise_of_decisions_is_a_fraction_where_the_baseline_moves_nothing_too(tmp_path: Path) -> None:
    """Every expert has as many tokens as the mean; one token of a perturbed run moves two of 8."""
    still = (0.0,) * 8
    baseline = Run(signs=(still, LATER)).write(tmp_path / "baseline")
    perturbed = Run(signs=((1.0, -1.0, *still[2:]), LATER)).write(tmp_path / "perturbed")
    noise = measure_noise(baseline, [perturbed], seeds=(1,))
    key = TraceKey(step=0, update=0, kind="parameter", name=BIAS)
    assert (noise.tensors[key].relative, noise.tensor(key).relative) == ((2 / 8,), 6 / 8)


def test_the_direction_of_an_update_is_that_of_what_has_gradients(tmp_path: Path) -> None:
    """Weights moved alike. With the bias, whose steps all turned, the cosine would be negative."""
    baseline, candidate = Run(), Run(signs=(tuple(-sign for sign in SIGNS), LATER))
    folders = baseline.write(tmp_path / "a"), candidate.write(tmp_path / "b")
    directions = UpdateDirections()
    with open_trace(folders[0]) as ours, open_trace(folders[1]) as theirs, TracePair(ours, theirs) as traces:
        directions.add_step(traces, 0)
    assert [(item.update, item.cosine, item.ratio) for item in directions.found] == [(0, 1.0, 1.0), (1, 1.0, 1.0)]
    assert directions.left_out == set()


def test_a_run_whose_bias_alone_moves_has_trained_nothing(tmp_path: Path) -> None:
    """A learning rate of 0: parameters with gradients stay, and any change to the optimizer would look equal."""
    baseline = tmp_path / "baseline"
    entries = [
        _entry("initial", WEIGHT, torch.ones(2, 3)),
        _entry("initial", BIAS, torch.zeros(8)),
        _entry("gradient", WEIGHT, torch.ones(2, 3)),
        _entry("parameter", WEIGHT, torch.ones(2, 3)),
        _entry("parameter", BIAS, RATE * torch.tensor(SIGNS)),
    ]
    save_rank_trace(baseline, step=0, global_rank=0, world_size=1, coordinates={}, entries=entries)
    alignment = judge(compare_trace_folders(baseline, baseline, bounds=UNBOUNDED), UNBOUNDED)
    assert alignment.kind is VerdictKind.INCOMPARABLE
    assert describe_reason(alignment).startswith("nothing was trained: no update of the baseline changed a parameter")
