"""Behind inputs equal to the last bit: what one kernel's rounding makes of a tensor, and what it cannot."""

import pytest
import torch

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED
from mock_scheduler.comparison.explain.spread import measure_spread
from mock_scheduler.comparison.noise.one_kernel import KernelExcess, find_kernel_excess
from mock_scheduler.comparison.tensors import Figures, TensorDifference, WorstElement
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, TraceKind
from mock_scheduler.trace.entries import TraceKey
from tests.comparison.rounding import rounded_otherwise

BFLOAT16 = UNIT_ROUNDOFFS["bfloat16"]
FLOAT32 = UNIT_ROUNDOFFS["float32"]


def difference(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    *,
    kind: TraceKind = "activation",
    name: str = "decoder.layers.0",
    pieces: tuple[int, ...] = (),
) -> TensorDifference:
    """The comparison of two whole tensors, with its figures."""
    a, b = baseline.double().flatten(), candidate.double().flatten()
    apart = (a - b).abs()
    worst = int(apart.argmax())
    figures = Figures(
        num_elements=a.numel(),
        num_different=int((a != b).sum()),
        max_abs=float(apart.max()),
        norm=float(apart.norm()),
        relative=float(apart.norm() / a.norm()),
        slope=float((a * b).sum() / (a * a).sum()),
        cosine=1.0,
        max_ulp=None,
        worst=WorstElement(index=(worst,), baseline=float(a[worst]), candidate=float(b[worst])),
    )
    return TensorDifference(
        key=TraceKey(step=0, update=0, kind=kind, name=name),
        num_elements=a.numel(),
        bit_equal=not bool(apart.any()),
        max_abs=figures.max_abs,
        relative=figures.relative,
        tolerance=UNBOUNDED.tensor(TraceKey(step=0, update=0, kind=kind, name=name)).relative,
        size=float(a.norm()),
        figures=figures,
        spread=measure_spread(baseline, candidate, boundaries={1: pieces}),
    )


def test_another_kernel_of_bfloat16_is_rounding(hidden: torch.Tensor) -> None:
    found = difference(hidden, rounded_otherwise(hidden))
    assert 0.0 < found.relative < BFLOAT16
    assert find_kernel_excess(found, unit=BFLOAT16) is None


def test_equal_bits_are_no_excess(hidden: torch.Tensor) -> None:
    assert find_kernel_excess(difference(hidden, hidden.clone()), unit=BFLOAT16) is None


def test_partial_sums_rounded_on_the_way_are_rounding() -> None:
    """A product in two halves, each rounded to bfloat16, whose sum cancels."""
    generator = torch.Generator().manual_seed(6)
    a, b = torch.randn(300, 128, generator=generator), torch.randn(128, 64, generator=generator)
    whole = (a @ b).bfloat16()
    halves = (a[:, :64] @ b[:64]).bfloat16() + (a[:, 64:] @ b[64:]).bfloat16()
    assert find_kernel_excess(difference(whole, halves), unit=BFLOAT16) is None


def _one_token(values: torch.Tensor) -> torch.Tensor:
    values[17] = values[18]
    return values


def _zero(values: torch.Tensor) -> torch.Tensor:
    place = int((values.float() - 1.0).abs().argmin())  # a middling element
    values.view(-1)[place] = 0.0
    return values


def _missing_part(values: torch.Tensor) -> torch.Tensor:
    return values - 0.1 * values.roll(1, dims=0)


@pytest.mark.parametrize(
    ("change", "test"),
    [(_one_token, "size"), (_zero, "element"), (_missing_part, "size"), (lambda values: values * 1.008, "scale")],
)
def test_a_wrong_value_stands_out_of_bfloat16(hidden: torch.Tensor, change: object, test: str) -> None:
    """One token of 300, an exact zero, a missing part, a factor: each is within what perturbed weights may do."""
    assert callable(change)
    excess = find_kernel_excess(difference(hidden, change(rounded_otherwise(hidden))), unit=BFLOAT16)
    assert isinstance(excess, KernelExcess)
    assert excess.test == test
    assert excess.value > excess.limit


def test_a_factor_that_bfloat16_hardly_shows_has_a_direction(hidden: torch.Tensor) -> None:
    excess = find_kernel_excess(difference(hidden, (hidden.float() * 0.9978).bfloat16()), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.limit) == ("scale", 2.0**-14)


def _one_token_larger(values: torch.Tensor) -> torch.Tensor:
    values[17] = values[17] * 1.01
    return values


def _second_half(values: torch.Tensor) -> torch.Tensor:
    values[150:] = rounded_otherwise(values[150:])
    return values


@pytest.mark.parametrize(("change", "value"), [(_one_token_larger, 299 / 300), (_second_half, 0.5)])
def test_tokens_that_another_kernel_left_as_they_are_stand_out(
    hidden: torch.Tensor, change: object, value: float
) -> None:
    """One token of 300, and the tokens of one of two ranks, by no more than one unit each."""
    assert callable(change)
    excess = find_kernel_excess(difference(hidden, change(hidden.clone())), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.value) == ("rows", pytest.approx(value))


def test_a_few_first_tokens_that_nothing_rounds_do_not(hidden: torch.Tensor) -> None:
    """A token that attends to itself alone is equal in every kernel: one in five of short sequences."""
    changed = rounded_otherwise(hidden)
    changed[::5] = hidden[::5]
    assert find_kernel_excess(difference(hidden, changed), unit=BFLOAT16) is None


def test_sums_of_another_tile_in_float32_do_not(hidden: torch.Tensor) -> None:
    """Half of the rows are added in another order: by a unit of float32, and in the numbers of bfloat16 hardly any."""
    half = hidden.float()
    half[150:] = half[150:] * (1 + 2.0**-23)
    assert find_kernel_excess(difference(hidden.float(), half), unit=FLOAT32) is None


def test_a_look_up_copies_rows_and_rounds_nothing(hidden: torch.Tensor) -> None:
    """Fourteen different tokens, times 1.002: half of the numbers move by one unit, as by rounding."""
    rows = hidden[torch.arange(len(hidden)) % 14]
    scaled = (rows.float() * 1.002).to(rows.dtype)
    assert find_kernel_excess(difference(rows, scaled, name="decoder.layers.0"), unit=BFLOAT16) is None
    excess = find_kernel_excess(difference(rows, scaled, name="embedding"), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.limit, excess.relative_limit) == ("copy", 0.0, 0.0)
    assert 0.0005 < excess.value < 0.002


def test_one_token_in_a_mask_of_many_is_no_rounding() -> None:
    """One of 20,000 is 0.7 % of the mask, less than a kernel of bfloat16 may round."""
    mask = torch.ones(20_000)
    other = mask.clone()
    other[7] = 0.0
    excess = find_kernel_excess(difference(mask, other, kind="input", name="response_mask"), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.limit) == ("copy", 0.0)


def test_a_look_up_of_ranks_may_turn_the_sign_of_zero(hidden: torch.Tensor) -> None:
    """Each tensor-parallel rank adds 0 where another one holds the row."""
    rows = hidden.clone()
    rows[0] = -0.0
    changed = rows.clone()
    changed[0] = 0.0
    assert find_kernel_excess(difference(rows, changed, name="embedding"), unit=BFLOAT16) is None


def _rounded_to(values: torch.Tensor, bits: int) -> torch.Tensor:
    half = 1 << (22 - bits)
    return ((values.view(torch.int32) + half) & ~(2 * half - 1)).view(torch.float32)


@pytest.mark.parametrize(("bits", "named"), [(7, 7), (8, None), (10, 10), (12, None)])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_factors_of_a_narrower_type_are_known_by_the_size_of_the_difference(
    hidden: torch.Tensor, bits: int, named: int | None, spread: float
) -> None:
    """A linear layer of TF32 (10 bits) or bfloat16 (7) within float32."""
    weight = torch.randn(hidden.shape[1], 48, generator=torch.Generator().manual_seed(5))
    weight = (weight.abs() ** spread) * weight.sign()
    inputs = hidden.float() * 1.2345
    product = inputs @ weight
    found = difference(product, _rounded_to(inputs, bits) @ _rounded_to(weight, bits))
    excess = find_kernel_excess(found, unit=FLOAT32)
    assert excess is not None
    assert (excess.test, excess.input_bits) == ("size", named)


def test_a_factor_near_1_of_that_size_is_no_rounding_of_factors(hidden: torch.Tensor) -> None:
    values = hidden.float()
    excess = find_kernel_excess(difference(values, values * (1.0 + 2.7e-4)), unit=FLOAT32)
    assert excess is not None
    assert excess.input_bits is None


def test_one_rank_alone_stands_out(hidden: torch.Tensor) -> None:
    """A head of tp rank 1: no kernel rounds the heads of one rank and none of another's."""
    changed = hidden.clone()
    changed[:, 48:] = rounded_otherwise(hidden)[:, 48:]
    assert find_kernel_excess(difference(hidden, changed), unit=BFLOAT16) is None  # nobody knows of ranks
    excess = find_kernel_excess(difference(hidden, changed, pieces=(0, 32)), unit=BFLOAT16)
    assert excess == KernelExcess(test="piece", value=0.5, limit=0.0)


def test_what_is_made_in_float32_behind_a_model_of_bfloat16_is_held_to_float32(hidden: torch.Tensor) -> None:
    """Another temperature moved log-probabilities by less than bfloat16 rounds, and nothing of theirs is bfloat16."""
    logprobs = -hidden.float().abs().flatten()[:100] * 1.1
    excess = find_kernel_excess(difference(logprobs, logprobs * 1.002, kind="output", name="logprobs"), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.limit) == ("size", 2.0**-14)
    narrow = logprobs.bfloat16().float()
    other = rounded_otherwise(narrow.bfloat16()).float()
    assert find_kernel_excess(difference(narrow, other, kind="output", name="logprobs"), unit=BFLOAT16) is None


def test_sums_of_float32_that_cancel_are_rounding_and_ten_bits_are_not() -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randn(64, 4096, generator=generator), torch.randn(4096, 64, generator=generator)
    whole = a @ b
    other_order = (a.flip(1).double() @ b.flip(0).double()).float()
    assert find_kernel_excess(difference(whole, other_order, kind="gradient"), unit=FLOAT32) is None

    def ten_bits(values: torch.Tensor) -> torch.Tensor:
        return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    excess = find_kernel_excess(difference(whole, ten_bits(a) @ ten_bits(b), kind="gradient"), unit=FLOAT32)
    assert excess is not None
    assert excess.test == "size"


def test_an_update_of_equal_gradients_may_not_be_twice_as_far(hidden: torch.Tensor) -> None:
    """Whatever the model computes in, its parameters are updated in float32."""
    change = hidden.float()
    twice = find_kernel_excess(difference(change, 2.0 * change, kind="parameter"), unit=BFLOAT16)
    assert twice == KernelExcess(test="update", value=1.0, limit=2.0**-10)
    assert find_kernel_excess(difference(change, change * (1 + 2.0**-20), kind="parameter"), unit=BFLOAT16) is None


def test_a_norm_of_equal_gradients_is_added_in_float32() -> None:
    """Counting what is on two ranks twice moved it by half a percent, in bfloat16 as well."""
    norm = torch.tensor([1.5])
    excess = find_kernel_excess(difference(norm, norm * 1.005, kind="gradient_norm", name="grad_norm"), unit=BFLOAT16)
    assert excess is not None
    assert (excess.test, excess.limit) == ("size", 2.0**-14)
    assert find_kernel_excess(difference(norm, norm * (1 + 2.0**-22), kind="gradient_norm"), unit=BFLOAT16) is None


def test_equal_scores_choose_equal_experts() -> None:
    chosen = torch.tensor([[0, 1], [2, 3], [0, 2]])
    other = torch.tensor([[0, 1], [2, 3], [1, 2]])
    found = difference(chosen, other, kind="router", name="decoder.layers.1.mlp.router.chosen_experts")
    excess = find_kernel_excess(found, unit=BFLOAT16)
    assert excess is not None
    assert excess.test == "choice"


def test_a_test_of_something_else_leaves_no_room_for_the_whole_tensor(hidden: torch.Tensor) -> None:
    """A verdict said: differs by 0.0017 (bound 0.023), the bound being a share of tokens."""
    uneven = find_kernel_excess(difference(hidden, _one_token_larger(hidden.clone())), unit=BFLOAT16)
    large = find_kernel_excess(difference(hidden, hidden * 1.1), unit=BFLOAT16)
    assert uneven is not None
    assert large is not None
    assert (uneven.test, uneven.relative_limit) == ("rows", 0.0)
    assert (large.test, large.relative_limit) == ("size", 2.5 * BFLOAT16)
