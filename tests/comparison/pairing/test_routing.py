"""Which tokens with other experts are excused as rounding, by the router's logits of both runs; and who lost whom."""

import torch

from mock_scheduler.comparison.measure.figures import sum_pair
from mock_scheduler.comparison.pairing.pairs import TensorPair
from mock_scheduler.comparison.pairing.routing import explain_choice, find_flips
from mock_scheduler.comparison.pairing.tokens import align_tokens
from mock_scheduler.comparison.residuals import OtherChoice
from mock_scheduler.trace.entries import DimName, RowTable, TraceKey
from mock_scheduler.trace.full.whole import WholeTensor
from mock_scheduler.verdict.wording.residuals import describe_residual

_ROUTER = "decoder.layers.1.mlp.router"


def _pair(name: str, baseline: torch.Tensor, candidate: torch.Tensor, dims: tuple[DimName, ...]) -> TensorPair:
    key = TraceKey(step=0, update=0, kind="router", name=f"{_ROUTER}.{name}")
    sums = sum_pair(baseline, candidate)
    return TensorPair(
        key=key, values=(WholeTensor.of(baseline), WholeTensor.of(candidate)), dims=dims, present=None, sums=sums
    )


def flipped(
    logits: list[list[float]], moved: list[list[float]], chosen: list[list[int]], other: list[list[int]]
) -> list[bool]:
    """For each token, whether its other choice is excused."""
    choice = _pair("chosen_experts", torch.tensor(chosen), torch.tensor(other), ("token", "slot"))
    scores = _pair("logits", torch.tensor(logits), torch.tensor(logits) + torch.tensor(moved), ("token", "expert"))
    summary, is_flipped = find_flips(choice, scores)
    assert summary.num_flipped == int(is_flipped.sum())
    return is_flipped.tolist()


def test_experts_whose_logits_moved_across_each_other_are_rounding() -> None:
    assert flipped([[0.5, 0.499, -1.0]], [[0.0, 0.002, 0.0]], [[0]], [[1]]) == [True]


def test_an_expert_far_behind_is_no_rounding() -> None:
    assert flipped([[0.5, 0.3, -1.0]], [[0.0, 0.002, 0.0]], [[0]], [[1]]) == [False]


def test_equal_logits_excuse_no_choice() -> None:
    """A router that chose without the expert bias: expert 1 had the lower logit and the bias, and lost it."""
    assert flipped([[0.5, 0.3, -1.0]], [[0.0, 0.0, 0.0]], [[1]], [[0]]) == [False]


def test_a_tie_that_another_kernel_breaks_otherwise_is_no_rounding_either() -> None:
    assert flipped([[0.5, 0.5, -1.0]], [[0.0, 0.0, 0.0]], [[0]], [[1]]) == [False]


def test_a_token_that_lost_an_expert_was_dropped() -> None:
    assert flipped([[0.5, 0.499, -1.0]], [[0.0, 0.002, 0.0]], [[0, 1]], [[1, -1]]) == [False]


def explained(chosen: list[list[int]], other: list[list[int]]) -> tuple[OtherChoice, str]:
    """The first of other choices of two rows, and its words."""
    choice = _pair("chosen_experts", torch.tensor(chosen), torch.tensor(other), ("token", "slot"))
    rows = RowTable(identities=("a", "b"), lengths=(1, len(chosen) - 1))
    found = explain_choice(choice, align_tokens(rows, rows))
    assert found is not None
    assert isinstance(found.detail, OtherChoice)
    return found.detail, describe_residual(found)


def test_a_dropped_token_is_named_with_its_lost_expert() -> None:
    found, text = explained([[0, 1], [0, 2], [1, 3]], [[0, 1], [2, -1], [-1, -1]])
    assert (found.sample, found.position, found.lost, found.gained) == ("b", 0, (0,), ())
    assert text == "2 of 3 tokens go to other experts (2 to fewer); the first, sample b, token 0, lost expert 0"


def test_a_token_with_another_expert_is_named_with_both() -> None:
    found, text = explained([[0, 1], [0, 2], [1, 3]], [[0, 1], [0, 2], [1, 2]])
    assert (found.position, found.lost, found.gained) == (1, (3,), (2,))
    assert text == "1 of 3 tokens go to other experts; the first, sample b, token 1, got expert 2 in place of expert 3"


def test_equal_choices_have_no_explanation() -> None:
    choice = _pair("chosen_experts", torch.tensor([[0, -1]]), torch.tensor([[0, -1]]), ("token", "slot"))
    rows = RowTable(identities=("a",), lengths=(1,))
    assert explain_choice(choice, align_tokens(rows, rows)) is None
