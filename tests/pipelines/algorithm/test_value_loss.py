"""The critic's loss of single tokens against its formula, evaluated by hand, its gradient, and what is logged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pipelines.algorithm.value_loss import (
    VALUE_METRIC_SUMS,
    ValueLossConfig,
    ValueLossInputs,
    ValueLossOutput,
    compute_value_loss,
    explained_variance,
)


def row(values: list[float], *, grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def loss_inputs(
    new: list[float], old: list[float], returns: list[float], *, mask: list[bool] | None = None
) -> ValueLossInputs:
    return ValueLossInputs(
        new_values=row(new, grad=True),
        old_values=row(old),
        returns=row(returns),
        response_mask=torch.tensor([mask or [True] * len(new)], dtype=torch.bool),
    )


def named(output: ValueLossOutput) -> dict[str, float]:
    return dict(zip(VALUE_METRIC_SUMS, output.metrics.tolist(), strict=True))


@pytest.mark.parametrize(
    ("new", "old", "value_return", "loss", "gradient"),
    [
        (1.25, 1.0, 2.0, 0.28125, -0.75),  # inside the clip: 0.5 · 0.75², v - R
        (2.0, 1.0, 3.0, 1.125, 0.0),  # moved 1 towards the return: max(1, (1.5 - 3)²) / 2, without gradient
        (2.0, 1.0, 1.0, 0.5, 1.0),  # moved away from it: max(1, 0.5²) / 2, with gradient
        (0.0, 1.0, -1.0, 1.125, 0.0),  # the same downwards: max(1, (0.5 + 1)²) / 2
        (0.0, 1.0, 1.0, 0.5, -1.0),
    ],
)
def test_clip_takes_the_larger_error_and_leaves_it_no_gradient(
    new: float, old: float, value_return: float, loss: float, gradient: float
) -> None:
    inputs = loss_inputs([new], [old], [value_return])
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5))
    output.total.backward()
    assert output.total.item() == loss
    assert inputs.new_values.grad is not None
    assert inputs.new_values.grad.item() == gradient
    assert named(output)["vf_clip_frac"] == float(gradient == 0.0)
    assert named(output)["value_squared_error"] == (new - value_return) ** 2


def test_without_clip_the_loss_is_half_the_squared_error() -> None:
    inputs = loss_inputs([2.0, 5.0], [1.0, -50.0], [3.0, 2.0])
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=None))
    output.total.backward()
    assert output.total.item() == 0.5 * 1.0 + 0.5 * 9.0
    assert inputs.new_values.grad is not None
    assert inputs.new_values.grad.tolist() == [[-1.0, 3.0]]
    assert named(output)["vf_clip_frac"] == 0.0


def test_terms_are_sums_over_response_tokens_and_nan_under_the_mask_does_not_count() -> None:
    nan = math.nan
    inputs = loss_inputs([1.0, nan, 2.0], [1.0, nan, 2.0], [2.0, nan, 4.0], mask=[True, False, True])
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5))
    output.total.backward()
    assert output.num_tokens.item() == 2
    assert named(output) == {
        "vf_loss": 0.5 * 1.0 + 0.5 * 4.0,
        "vf_clip_frac": 0.0,
        "value": 3.0,
        "value_squared_error": 5.0,
        "return": 6.0,
        "return_squared": 20.0,
        "kept_tokens": 2.0,
        "num_tokens": 2.0,
    }
    assert inputs.new_values.grad is not None
    assert inputs.new_values.grad.tolist() == [[-1.0, 0.0, -2.0]]


def test_gradient_is_that_of_finite_differences() -> None:
    """At points off the clip's corners, with and without clipping; gradcheck perturbs by 1e-6 in float64."""
    base = loss_inputs([1.2, 2.1, -0.3, 4.0], [1.0, 1.0, 0.6, 3.0], [2.0, 3.0, 0.4, -1.0])

    def total(new_values: torch.Tensor) -> torch.Tensor:
        inputs = ValueLossInputs(
            new_values=new_values,
            old_values=base.old_values,
            returns=base.returns,
            response_mask=base.response_mask,
        )
        return compute_value_loss(inputs, ValueLossConfig(value_clip=0.5)).total

    assert torch.autograd.gradcheck(total, (base.new_values,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_values_is_kept(dtype: torch.dtype) -> None:
    base = loss_inputs([1.0], [1.0], [1.0 + 1e-12])
    inputs = ValueLossInputs(
        new_values=base.new_values.to(dtype),
        old_values=base.old_values.to(dtype),
        returns=base.returns.to(dtype),
        response_mask=base.response_mask,
    )
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5))
    assert output.total.dtype is dtype
    assert (output.total.item() > 0.0) == (dtype is torch.float64)
    assert output.metrics.dtype is torch.float64


def test_a_micro_batch_without_response_tokens_adds_nothing() -> None:
    output = compute_value_loss(loss_inputs([1.0], [5.0], [2.0], mask=[False]), ValueLossConfig(value_clip=0.5))
    assert output.total.item() == 0.0
    assert output.metrics.tolist() == [0.0] * len(VALUE_METRIC_SUMS)


def test_a_rejected_token_teaches_the_critic_nothing() -> None:
    """Nor is it in the sums that explained variance comes from; the denominator has it, unless it is of kept tokens."""
    nan = math.nan
    inputs = loss_inputs(
        [1.0, nan, 2.0, nan], [1.0, nan, 2.0, nan], [2.0, nan, 5.0, nan], mask=[True, True, True, False]
    )
    inputs = replace(
        inputs, kept_mask=torch.tensor([[True, False, True, True]]), loss_weights=row([0.5, nan, 3.0, nan])
    )
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5))
    output.total.backward()
    assert output.total.item() == 0.5 * 0.5 + 3.0 * 4.5
    assert output.terms["vf_loss"].tolist() == [[0.25, 0.0, 13.5, 0.0]]
    assert output.num_tokens.item() == 3
    assert named(output) == {
        "vf_loss": 13.75,
        "vf_clip_frac": 0.0,
        "value": 3.0,
        "value_squared_error": 10.0,
        "return": 7.0,
        "return_squared": 29.0,
        "kept_tokens": 2.0,
        "num_tokens": 3.0,
    }
    assert inputs.new_values.grad is not None
    assert inputs.new_values.grad.tolist() == [[-0.5, 0.0, -9.0, 0.0]]
    # Errors 1 and 3, variance 1; returns 2 and 5, variance 9/4.
    assert explained_variance(named(output)) == pytest.approx(1.0 - 4 / 9, rel=1e-14)
    of_kept = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5, rs_denominator="kept"))
    assert of_kept.num_tokens.item() == 2


@pytest.mark.parametrize("value_clip", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_with_all_tokens_rejected_the_loss_is_0_with_a_live_graph(
    value_clip: float | None, shape: tuple[int, int]
) -> None:
    values = torch.full(shape, math.nan, requires_grad=True)
    inputs = ValueLossInputs(
        new_values=values,
        old_values=values.detach(),
        returns=values.detach(),
        response_mask=torch.ones(shape, dtype=torch.bool),
        kept_mask=torch.zeros(shape, dtype=torch.bool),
        loss_weights=values.detach(),
    )
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=value_clip, rs_denominator="kept"))
    output.total.backward()
    assert output.total.item() == output.num_tokens.item() == 0
    assert output.metrics.tolist() == [0.0] * len(VALUE_METRIC_SUMS)
    assert values.grad is not None
    assert values.grad.tolist() == torch.zeros(shape).tolist()


def test_other_shapes_are_refused_by_name() -> None:
    inputs = ValueLossInputs(
        new_values=torch.zeros(1, 3),
        old_values=torch.zeros(1, 2),
        returns=torch.zeros(3),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
        kept_mask=torch.ones(1, 4, dtype=torch.bool),
        loss_weights=torch.ones(1, 3),
    )
    message = (
        r"^value loss: old_values has shape \[1, 2\], response_mask has \[1, 3\]; "
        r"returns has shape \[3\], response_mask has \[1, 3\]; "
        r"kept_mask has shape \[1, 4\], response_mask has \[1, 3\]$"
    )
    with pytest.raises(ValueError, match=message):
        compute_value_loss(inputs, ValueLossConfig(value_clip=None))


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 6.0], [1.0, 2.0, 6.0], 1.0),
        ([3.0, 3.0, 3.0], [1.0, 2.0, 6.0], 0.0),
        ([11.0, 12.0, 16.0], [1.0, 2.0, 6.0], 1.0),  # a constant error is not unexplained variance
        # Errors R - v 0, 0, 2: variance 8 / 9; returns 1, 2, 6: variance 14 / 3.
        ([1.0, 2.0, 4.0], [1.0, 2.0, 6.0], 1.0 - (8 / 9) / (14 / 3)),
        ([1.0, 2.0, 4.0], [0.1, 0.1, 0.1], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance_comes_from_sums(values: list[float], returns: list[float], expected: float) -> None:
    output = compute_value_loss(loss_inputs(values, values, returns), ValueLossConfig(value_clip=None))
    assert explained_variance(named(output)) == pytest.approx(expected, abs=1e-14)


def test_explained_variance_of_parts_is_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    values, returns = torch.randn(2, 40, generator=generator, dtype=torch.float64).unbind()
    config = ValueLossConfig(value_clip=0.5)
    parts = [
        named(compute_value_loss(loss_inputs(v.tolist(), v.tolist(), r.tolist()), config))
        for v, r in zip(values.split([7, 32, 1]), returns.split([7, 32, 1]), strict=True)
    ]
    sums = {name: sum(part[name] for part in parts) for name in VALUE_METRIC_SUMS}
    expected = 1.0 - ((returns - values).var() / returns.var()).item()
    assert explained_variance(sums) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_that_moved_within_the_range_is_never_counted_as_clipped(dtype: torch.dtype) -> None:
    """old + (new - old) is new but for its last bit, and that bit counted: a metric that differed in every layout."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(1, 4096, generator=generator, dtype=dtype)
    new = old + torch.rand(1, 4096, generator=generator, dtype=dtype) * 0.8 - 0.4
    inputs = ValueLossInputs(
        new_values=new,
        old_values=old,
        returns=torch.randn(1, 4096, generator=generator, dtype=dtype),
        response_mask=torch.ones(1, 4096, dtype=torch.bool),
    )
    output = compute_value_loss(inputs, ValueLossConfig(value_clip=0.5))
    assert float(output.metrics[VALUE_METRIC_SUMS.index("vf_clip_frac")]) == 0.0
