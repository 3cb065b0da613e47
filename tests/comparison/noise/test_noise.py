"""Measured bounds, and the tests for what hides within them: each finds what is planted, and is silent without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.bounds.bounds import OtherCodeBounds, UniformBounds
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.bounds.tensor_noise import TensorNoise
from mock_scheduler.comparison.measure.distance import compare_updates
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.files import NOISE_FILE, find_noise, load_noise, save_noise
from mock_scheduler.comparison.noise.judging import Series, measure_drift
from mock_scheduler.comparison.noise.slopes import judge_behind_equal_forward, judge_slopes, robust_z
from mock_scheduler.comparison.tensors import Figures, TensorDifference
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.trace.entries import TraceEntry, TraceKey
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.bounds import describe_bounds, describe_suspicion
from mock_scheduler.verdict.wording.verdicts import describe_reason
from tests.rank_traces import save_rank_trace

WEIGHT = TraceKey(step=0, update=0, kind="gradient", name="decoder.layers.0.mlp.linear_fc1.weight")
HIDDEN = "decoder.layers.0"


def key(number: int) -> TraceKey:
    return replace(WEIGHT, name=f"decoder.layers.{number}.mlp.linear_fc1.weight")


def bounds(tensors: dict[TraceKey, TensorNoise]) -> NoiseBounds:
    return NoiseBounds(
        baseline="", seeds=(1, 2), unit_roundoffs=1.0, unit=2.0**-24, epsilon=2.0**-23, tensors=tensors,
        metrics={(3, "loss"): (0.4, -0.5)}, metric_values={(3, "loss"): 8.0},
    )  # fmt: skip


def difference(at: TraceKey, slope: float) -> TensorDifference:
    figures = Figures(
        num_elements=64, num_different=64, max_abs=0.1, norm=0.02, relative=0.02, slope=slope, cosine=1.0, max_ulp=9,
        worst=None,
    )  # fmt: skip
    return TensorDifference(
        key=at, num_elements=64, bit_equal=False, max_abs=0.1, relative=0.02, tolerance=0.15, figures=figures
    )


def test_a_bound_is_three_times_the_largest_noise_and_at_least_twelve_roundings() -> None:
    noisy, quiet, zero = key(0), key(1), key(2)
    noise = bounds({
        noisy: TensorNoise(relative=(0.015, 0.02)),
        quiet: TensorNoise(relative=(2.0**-30, 2.0**-29)),
        zero: TensorNoise(relative=(math.inf, math.inf), absolute=0.125),
    })  # fmt: skip
    assert noise.tensor(noisy).relative == 3 * 0.02
    assert noise.tensor(quiet).relative == 12 * 2.0**-24
    assert (noise.tensor(zero).relative, noise.tensor(zero).absolute) == (0.0, 0.375)
    assert noise.tensor(key(3)).relative == math.inf
    assert noise.metric(3, "loss").limit(8.0, 9.0) == 3 * 0.5
    assert noise.metric(4, "loss").limit(8.0, 9.0) == math.inf


def test_where_one_run_needs_more_of_the_others_a_candidate_may_differ_by_more() -> None:
    """A weight with a gradient near 0 moved by a whole step in one of five runs: of an honest sixth it did, too."""
    calm, tail, other = key(0), replace(key(0), kind="parameter"), replace(key(1), kind="parameter")
    noise = bounds({
        calm: TensorNoise(relative=(0.01, 0.02, 0.015)),
        tail: TensorNoise(relative=(0.01, 0.01, 0.04)),
        other: TensorNoise(relative=(0.01, 0.02, 0.02)),
    })  # fmt: skip
    assert noise.factors == {("parameter", 0, 0): 8.0}
    assert noise.tensor(calm).relative == 3 * 0.02
    assert noise.tensor(tail).relative == 8 * 0.04
    assert noise.tensor(other).relative == 8 * 0.02
    assert "3 times (of parameter up to 8 times) the largest difference" in describe_bounds(noise)
    rare = bounds({tail: TensorNoise(relative=(1e-5, 1e-5, 0.04)), other: TensorNoise(relative=(0.0, 0.0, 0.02))})
    assert rare.factors == {("parameter", 0, 0): 9.0}
    assert rare.tensor(replace(other, update=1)).relative == math.inf
    assert bounds({other: TensorNoise(relative=(0.0, 1e-8, 0.02))}).factors == {}  # moved in no other run at all


def test_each_perturbed_run_is_held_to_the_others() -> None:
    """The third one differs by 4 times what the others do in a gradient, and by 9 times in a metric."""
    still, share = replace(key(2), kind="parameter"), replace(WEIGHT, kind="loss", name="mean.clip_frac")
    noise = replace(
        bounds({
            key(0): TensorNoise(relative=(0.01, 0.01, 0.04)),
            key(1): TensorNoise(relative=(0.02, 0.03, 0.03)),
            still: TensorNoise(relative=(0.0, 0.0, 0.5)),
            share: TensorNoise(relative=(0.1, 0.1, 0.9), size=1.0),
        }),
        seeds=(1, 2, 3), metrics={(3, "loss"): (0.25, -0.5, 4.5), (3, "kl"): (0.0, 0.0, 1.0)},
        metric_values={(3, "loss"): 8.0, (3, "kl"): 0.0},
    )  # fmt: skip
    assert noise.held_out == (0, 0, 2)
    assert describe_bounds(noise).endswith(
        "Of these 3 runs, each held to the others, 1 is beyond its bounds, in 2 figures."
    )
    calm = replace(noise, tensors={key(1): noise.tensors[key(1)]}, metrics={}, metric_values={})
    assert describe_bounds(calm).endswith("Of these 3 runs, each held to the others, none is beyond its bounds.")
    assert bounds({key(0): TensorNoise(relative=(0.01, 0.04))}).held_out == ()


def test_a_share_of_tokens_is_held_to_the_largest_change_of_any_update_and_to_one_token() -> None:
    """A clip that turned: 0.25 of an update's clipped tokens where the perturbed runs turned 0.06."""
    share = replace(WEIGHT, kind="loss", name="mean.clip_frac")
    count = replace(share, name="mean.num_response_tokens")
    noise = bounds({
        share: TensorNoise(relative=(0.0, 0.0), size=0.1),
        replace(share, update=1): TensorNoise(relative=(0.0, 0.5), size=0.08),
        replace(share, update=2): TensorNoise(relative=(math.inf, 0.0), absolute=0.01),
        count: TensorNoise(relative=(0.0, 0.0), size=50.0),
        replace(count, update=1): TensorNoise(relative=(0.0, 0.0), size=10.0),
    })  # fmt: skip
    assert [noise.tensor(replace(share, update=update)).absolute for update in (0, 1, 2)] == [0.12, 0.12, 0.12]
    still = replace(
        noise, tensors={at: replace(item, relative=(0.0, 0.0), absolute=0.0) for at, item in noise.tensors.items()}
    )
    assert [still.tensor(replace(share, update=update)).absolute for update in (0, 1)] == [1 / 50, 1 / 10]
    assert (noise.tensor(share).relative, noise.factors) == (0.0, {})
    metrics = {(step, "clip_frac"): changes for step, changes in ((0, (0.0, 0.0)), (1, (0.01, -0.02)))}
    counted = {(step, "num_response_tokens"): (0.0, 0.0) for step in (0, 1)}
    values = {**dict.fromkeys(metrics, 0.1), (0, "num_response_tokens"): 2.0, (1, "num_response_tokens"): 100.0}
    values[0, "num_updates"] = 4.0
    noise = replace(noise, metrics={**metrics, **counted}, metric_values=values)
    assert [noise.metric(step, "clip_frac").absolute for step in (0, 1)] == [1 / 8, 3 * 0.02]


def test_the_robust_z_of_slopes_is_that_of_its_formula() -> None:
    """Median 2, absolute deviations 1, 1, 0, 1, 2 with median 1: the spread is 1.4826 / √5."""
    middle, spread, z = robust_z([1.0, 1.0, 2.0, 3.0, 4.0])
    assert (middle, spread) == (2.0, 1.4826 / math.sqrt(5))
    assert z == pytest.approx(2.0 * math.sqrt(5) / 1.4826)


def slopes_of(shift: float) -> tuple[list[TensorDifference], NoiseBounds]:
    """Twelve gradients; slopes of two perturbed runs are 2e-4 and 4e-4 off to either side, by turns."""
    off = [1e-4 * (1 + number % 3) * (-1) ** number for number in range(12)]
    noise = {
        key(number): TensorNoise(relative=(0.02, 0.03), slopes=(1.0 + 2 * item, 1.0 - 2 * item))
        for number, item in enumerate(off)
    }
    return [difference(key(number), 1.0 + item + shift) for number, item in enumerate(off)], bounds(noise)


def test_a_scale_error_far_below_the_noise_is_found_and_named_and_an_honest_run_is_not() -> None:
    """A change of 0.3 % in gradients that differ by 2 %."""
    found, summary = judge_slopes(*slopes_of(0.0), numbers={})
    assert found == []
    assert summary.num_looked_at == 12
    (suspicion,) = judge_slopes(*slopes_of(3e-3), numbers={})[0]
    assert (suspicion.test, suspicion.step, suspicion.update, suspicion.name) == ("slope", 0, 0, "")
    assert describe_suspicion(suspicion).startswith(
        "step 0, update 0: the candidate's gradients together are 1.003 times the baseline's"
    )
    (suspicion,) = judge_slopes(*slopes_of(0.02), numbers={"tokens": 1.02})[0]
    assert "1.02 times the baseline's (tokens)" in describe_suspicion(suspicion)


def test_the_limit_of_a_slope_is_wider_where_fewer_runs_measured_it() -> None:
    """Two runs called honest layouts of an attached training scaled, by 1.4 times the limit of two."""
    differences, noise = slopes_of(0.0)
    limits = [
        judge_slopes(differences, replace(noise, seeds=tuple(range(num_runs))), numbers={})[1].alone
        for num_runs in (2, 5, 8)
    ]
    assert limits[1] == limits[2] == pytest.approx(5 * 4e-4)
    assert limits[0] == pytest.approx(5 * 4e-4 * math.sqrt(5 / 2))


def test_slopes_that_move_together_in_perturbed_runs_do_so_in_honest_ones() -> None:
    """All slopes of an update follow the loss: z alone called honest layouts in bfloat16 scaled."""
    differences, noise = slopes_of(3e-3)
    together = {
        at: replace(item, slopes=tuple(slope + 2e-3 for slope in item.slopes)) for at, item in noise.tensors.items()
    }
    assert judge_slopes(differences, replace(noise, tensors=together), numbers={})[0] == []


def behind(slopes: list[float], *, equal: bool = True, relative: float = 3.1e-3) -> list[TensorDifference]:
    """Gradients of these slopes, and the output of the forward pass before them."""
    output = TensorDifference(
        key=TraceKey(step=0, update=0, kind="output", name="logprobs"), num_elements=9, bit_equal=equal, max_abs=0.0,
        relative=0.0 if equal else 1e-3, tolerance=0.1,
    )  # fmt: skip
    return [
        output,
        *(replace(difference(key(at), slope), size=1.0, relative=relative) for at, slope in enumerate(slopes)),
    ]


def test_a_scale_behind_an_equal_forward_pass_needs_no_noise_to_be_found() -> None:
    """0.3 % where slopes of perturbed runs are 5 % off, all of them to one side."""
    noise = bounds({key(at): TensorNoise(relative=(0.2, 0.3), slopes=(1.05, 0.95)) for at in range(12)})
    scaled = [1.003 + 1e-5 * (-1) ** at for at in range(12)]
    (suspicion,) = judge_behind_equal_forward(behind(scaled), noise, numbers={})
    assert (suspicion.test, suspicion.step, suspicion.update, suspicion.name) == ("slope", 0, 0, "")
    assert suspicion.value == pytest.approx(3e-3, rel=0.01)
    assert "gradients together are 1.00" in describe_suspicion(suspicion)
    assert judge_behind_equal_forward(behind(scaled, equal=False), noise, numbers={}) == []
    assert judge_behind_equal_forward(behind(scaled)[1:], noise, numbers={}) == []  # no forward pass was compared


def test_roundings_of_the_backward_pass_have_no_common_sign() -> None:
    noise = bounds({})
    honest = [1.0 + 1e-5 * (1 + at % 3) * (-1) ** at for at in range(12)]
    assert judge_behind_equal_forward(behind(honest), noise, numbers={}) == []


def test_one_scaled_gradient_behind_an_equal_forward_pass_is_named_and_one_that_differs_otherwise_is_not() -> None:
    noise = bounds({})
    slopes = [1.0 + 1e-5 * (1 + at % 3) * (-1) ** at for at in range(12)]
    slopes[5] = 1.003
    (suspicion,) = judge_behind_equal_forward(behind(slopes), noise, numbers={})
    assert suspicion.name == key(5).name
    assert "is 1.003 times the baseline's and differs by nothing else" in describe_suspicion(suspicion)
    assert judge_behind_equal_forward(behind(slopes, relative=0.02), noise, numbers={}) == []


def test_one_tensor_of_another_scale_is_named() -> None:
    differences, noise = slopes_of(0.0)
    differences[5] = difference(key(5), 1.01)
    (suspicion,) = judge_slopes(differences, noise, numbers={})[0]
    assert suspicion.name == key(5).name
    assert "is 1.01 times the baseline's" in describe_suspicion(suspicion)


def test_a_bias_of_one_sign_is_a_drift_unless_perturbed_runs_drift_as_far() -> None:
    """Sixteen steps of half the noise, all up: 4 sigma. Perturbed runs go up and down, or one goes up too."""
    fair = tuple((-1.0) ** step for step in range(16))
    series = Series(name="loss", changes=(0.5,) * 16, noise=(fair, fair), smallest=(0.0,) * 16)
    drift = measure_drift(series)
    assert (drift.sigma, drift.mean, drift.noise_mean, drift.is_one_way) == (4.0, 0.5, 0.0, True)
    assert not measure_drift(replace(series, noise=(fair, (1.0,) * 16))).is_one_way
    assert not measure_drift(replace(series, changes=fair)).is_one_way


def write(folder: Path, gradient: torch.Tensor, hidden: torch.Tensor) -> Path:
    """A run of one update whose parameter follows its gradient."""
    tensors = {"initial": torch.ones(64), "gradient": gradient, "parameter": torch.ones(64) - 2.0**-7 * gradient}
    entries = [
        TraceEntry(update=0, kind=kind, spec=whole("decoder.final_layernorm.weight", (64,)), tensor=tensor)
        for kind, tensor in tensors.items()
    ]  # fmt: skip
    entries.append(
        TraceEntry(
            update=0, kind="activation_gradient", spec=whole(HIDDEN, tuple(hidden.shape)), tensor=hidden,
            dims=("token", "channel"),
        )
    )  # fmt: skip
    save_rank_trace(folder / "trace", step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)
    return folder


def noisy(seed: int, *, hidden: bool = True) -> Sequence[torch.Tensor]:
    """Gradients and an activation's gradients that differ by 2 % at every element."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.linspace(1.0, 2.0, 64)
    states = torch.linspace(1.0, 2.0, 128 * 64).view(128, 64)
    return [
        side * (1.0 + 0.02 * (torch.rand(side.shape, generator=generator) - 0.5) * (seed > 0))
        for side in (gradient, states)
    ]


def measured(tmp_path: Path) -> tuple[Path, NoiseBounds]:
    baseline = write(tmp_path / "a", *noisy(0))
    perturbed = [write(tmp_path / f"p{seed}", *noisy(seed)) for seed in range(1, 6)]
    return baseline, measure_noise(baseline, perturbed, seeds=range(1, 6))


def judge(baseline: Path, candidate: Path, noise: NoiseBounds) -> tuple[VerdictKind, str]:
    compared = compare_trace_folders(baseline / "trace", candidate / "trace", bounds=noise)
    alignment = decide(None, compared, bounds=noise)
    return alignment.kind, describe_reason(alignment)


def test_a_token_of_128_with_no_gradient_is_suspicious_though_the_norm_is_within_its_noise(tmp_path: Path) -> None:
    baseline, noise = measured(tmp_path)
    gradient, hidden = noisy(9)
    verdict, reason = judge(baseline, write(tmp_path / "honest", gradient, hidden), noise)
    assert verdict is VerdictKind.ROUNDING
    assert reason.startswith("within the noise of 5 perturbed runs: 1 activation gradient (0 bit-equal), 1 gradient")
    assert "no place stands out in 2 tensors" in reason
    hidden[40] *= 0.8
    verdict, reason = judge(baseline, write(tmp_path / "wrong", gradient, hidden), noise)
    assert verdict is VerdictKind.SUSPECT
    assert f"activation gradient of {HIDDEN} at step 0, update 0: token 40 holds" in reason
    hidden[40] = 0.0
    assert judge(baseline, write(tmp_path / "none", gradient, hidden), noise)[0] is VerdictKind.DIVERGED


def test_noise_comes_back_from_its_file_and_is_found_beside_its_own_baseline_only(tmp_path: Path) -> None:
    baseline, noise = measured(tmp_path)
    save_noise(noise, tmp_path / NOISE_FILE)
    assert load_noise(tmp_path / NOISE_FILE) == noise
    assert find_noise(baseline) == noise
    other = write(tmp_path / "other", *noisy(7))
    assert find_noise(other) is None


def test_an_update_of_other_code_may_be_rounded_when_it_is_stored() -> None:
    """AdamW written out with another association moved parameters by a last place, which noise has nothing of."""
    generator = torch.Generator().manual_seed(11)
    before = torch.randn(64, 64, generator=generator)
    change = 2.5e-4 * torch.randn(64, 64, generator=generator).sign()
    after = before + change
    other = (before.double() + change.double() * (1 + 2.0**-23)).float()
    moved = torch.rand(64, 64, generator=generator) < 0.3
    other = torch.where(moved, other.nextafter(torch.full_like(other, torch.inf)), other)
    parameter = TraceKey(step=0, update=0, kind="parameter", name="w")
    inner = UniformBounds(is_exact=True)
    relative = []
    for limits in (inner, OtherCodeBounds(inner=inner)):
        found = compare_updates(
            parameter,
            before=(before, before),
            after=(after, other),
            gradients=None,
            significant=1.0,
            bound=limits.tensor(parameter),
        )
        relative.append((found.exceeds, found.relative))
    assert relative == [(True, pytest.approx(1.4e-4, rel=0.5)), (False, pytest.approx(1.4e-4, rel=0.5))]
    gradient = TraceKey(step=0, update=0, kind="gradient", name="w")
    assert OtherCodeBounds(inner=inner).tensor(gradient) == inner.tensor(gradient)
