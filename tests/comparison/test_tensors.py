"""Tensors of two traces: figures worked out by hand, execution order, and every planted difference named."""

import math
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.measure.distance import compare_updates, measure, with_rounding
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.traces import compare_traces
from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.trace.entries import TraceEntry, TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.comparison.stated import stated
from tests.rank_traces import save_rank_trace

BOUNDS = stated(gradient=1e-3, update=1e-4)
KEY = TraceKey(step=0, update=0, kind="gradient", name="output_layer.weight")


def save(trace_dir: Path, tensors: dict[str, torch.Tensor], *, step: int = 0) -> None:
    entries = [
        TraceEntry(
            update=0,
            kind=kind,
            spec=whole(name, tuple(tensor.shape)),
            tensor=torch.zeros_like(tensor) if kind == "initial" else tensor,
        )
        for kind in ("initial", "gradient", "parameter")
        for name, tensor in tensors.items()
    ]
    save_rank_trace(trace_dir, step=step, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)


def write_pieces(folder: Path, kind: TraceKind, tensor: torch.Tensor) -> None:
    entry = TraceEntry(update=0, kind=kind, spec=whole("w", tuple(tensor.shape)), tensor=tensor)
    save_rank_trace(folder, step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=[entry])


def compare(tmp_path: Path) -> TensorComparison:
    with open_trace(tmp_path / "a") as baseline, open_trace(tmp_path / "b") as candidate:
        return compare_traces(baseline, candidate, bounds=BOUNDS)


def gradient_difference(baseline: list[float], candidate: list[float], *, size: float) -> TensorDifference:
    pair = torch.tensor(baseline), torch.tensor(candidate)
    bound = TensorBound(relative=1e-3, has_rounding=True)
    return with_rounding(measure(KEY, *pair, bound=bound), bound, usual=size, unit=2.0**-23)


def test_a_gradient_that_is_rounding_is_not_judged_and_one_that_should_be_is_found() -> None:
    """A key norm's bias has a true gradient of 0: every honest layout was called diverged for its rounding."""
    rounding = gradient_difference([2.0**-24] * 4, [-(2.0**-24)] * 4, size=1.0)
    assert (rounding.relative, rounding.is_judged, rounding.exceeds) == (2.0, False, False)
    assert rounding.tolerance == 1e-3 + 16 * 2.0**-23 * 2 / (2.0**-24 * 2)
    wrong = gradient_difference([2.0**-24] * 4, [2.0**-10] * 4, size=1.0)
    assert (wrong.is_judged, wrong.exceeds) == (False, True)
    judged = gradient_difference([1.0] * 4, [1.0] * 4, size=1.0)
    assert (judged.tolerance, judged.is_judged) == (1e-3 + 16 * 2.0**-23, True)


def test_a_gradient_where_the_baseline_has_none_is_found() -> None:
    assert gradient_difference([0.0] * 4, [2.0**-10] * 4, size=1.0).exceeds
    assert not gradient_difference([0.0] * 4, [2.0**-24] * 4, size=1.0).exceeds
    assert gradient_difference([0.0] * 4, [2.0**-24] * 4, size=0.0).exceeds


def test_one_bit_is_a_difference_with_its_size() -> None:
    flipped = torch.ones(4)
    flipped.view(torch.int32)[0] ^= 1
    difference = measure(KEY, torch.ones(4), flipped, bound=TensorBound(relative=1e-3))
    assert (difference.bit_equal, difference.max_abs, difference.relative) == (False, 2**-23, 2**-24)
    assert (difference.exceeds, difference.margin) == (False, 1e-3 * 2**24)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (torch.ones(2, dtype=torch.float64), "has dtype float32 in the baseline and float64 in the candidate"),
        (torch.ones(3), "has shape [2] in the baseline and [3] in the candidate"),
        (torch.tensor([math.nan, 1.0]), "has NaN in 1 of 2 elements in the candidate"),
        (torch.tensor([math.inf, 1.0]), "has infinity in 1 of 2 elements in the candidate"),
    ],
)
def test_what_cannot_be_subtracted_is_a_finding(tmp_path: Path, candidate: torch.Tensor, message: str) -> None:
    for folder, gradient in (("a", torch.ones(2)), ("b", candidate)):
        write_pieces(tmp_path / folder, "gradient", gradient)
    (finding,) = compare(tmp_path).findings
    assert describe_finding(finding) == f"gradient of w at step 0, update 0 {message}"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([math.nan, 1.0], "has NaN in 1 of 2 elements in both runs"),
        (
            [math.inf, 2.0],
            "has NaN in 1 of 2 elements in the baseline and infinity in 1 of 2 elements in the candidate",
        ),
    ],
)
def test_what_is_not_finite_in_both_runs_is_unusable_whatever_its_bits(
    tmp_path: Path, other: list[float], message: str
) -> None:
    """Two runs of NaN were identical where their bits were equal, and diverged where they were not."""
    save(tmp_path / "a", {"w": torch.tensor([math.nan, 1.0])})
    save(tmp_path / "b", {"w": torch.tensor(other)})
    comparison = compare(tmp_path)
    assert comparison.findings == ()
    assert describe_finding(comparison.unusable[0]) == f"gradient of w at step 0, update 0 {message}"


def test_a_tensor_on_one_side_only_is_found_on_either_side(tmp_path: Path) -> None:
    save(tmp_path / "a", {"output_layer.weight": torch.ones(1), "decoder.a": torch.ones(1)})
    save(tmp_path / "b", {"output_layer.weight": torch.ones(1), "decoder.b": torch.ones(1)})
    comparison = compare(tmp_path)
    assert [describe_finding(finding) for finding in comparison.findings] == [
        "parameter of decoder.a before step 0 was traced by the baseline but not by the candidate",
        "gradient of decoder.a at step 0, update 0 was traced by the baseline but not by the candidate",
        "parameter of decoder.a at step 0, update 0 was traced by the baseline but not by the candidate",
        "parameter of decoder.b before step 0 was traced by the candidate but not by the baseline",
        "gradient of decoder.b at step 0, update 0 was traced by the candidate but not by the baseline",
        "parameter of decoder.b at step 0, update 0 was traced by the candidate but not by the baseline",
    ]


def test_a_step_on_one_side_only_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a", {"w": torch.ones(1)})
    for step in range(2):
        save(tmp_path / "b", {"w": torch.ones(1)}, step=step)
    (finding,) = compare(tmp_path).findings
    assert describe_finding(finding) == "step 1 was traced by the candidate but not by the baseline"


def test_groups_count_and_name_the_worst(tmp_path: Path) -> None:
    save(tmp_path / "a", {"same": torch.ones(1), "small": torch.ones(4), "large": torch.ones(4)})
    save(tmp_path / "b", {"same": torch.ones(1), "small": torch.full((4,), 1.0625), "large": torch.full((4,), 1.5)})
    group = compare(tmp_path).group("gradient", step=0)
    assert group is not None
    assert (group.num_compared, group.num_bit_equal) == (3, 1)
    assert (group.worst.key.name, group.worst.relative, group.worst.max_abs) == ("large", 0.5, 0.5)
    assert group.worst.exceeds


UPDATE = TensorBound(relative=5e-3, has_rounding=True)
UPDATED = TraceKey(step=0, update=0, kind="parameter", name="output_layer.weight")


def update_difference(
    before: torch.Tensor,
    change: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TensorDifference:
    after = (before + change[0], before + change[1])
    return compare_updates(
        UPDATED, before=(before, before), after=after, gradients=gradients, significant=1e-2, bound=UPDATE
    )


@pytest.mark.parametrize(("factor", "relative"), [(0.0, 1.0), (-1.0, 2.0), (1.25, 0.25)])
def test_a_frozen_a_reversed_and_a_scaled_optimizer_are_found_at_any_learning_rate(
    factor: float, relative: float
) -> None:
    """Relative to the parameter itself, a frozen optimizer at a learning rate of 1e-6 was within tolerance."""
    before = torch.full((64,), 0.25)
    for learning_rate in (2.0**-10, 2.0**-20):
        change = torch.full((64,), learning_rate)
        difference = update_difference(before, (change, change * factor))
        assert difference.relative == pytest.approx(relative)
        # 0.25 and a little more is stored with a spacing of 2**-25.
        assert difference.tolerance == pytest.approx(5e-3 + 2.0**-25 / learning_rate)
        assert (difference.is_judged, difference.exceeds) == (True, True)


def test_an_update_that_differs_by_the_rounding_of_storing_is_within_its_bound() -> None:
    before = torch.full((4,), 1.0)
    change = torch.full((4,), 2.0**-20)
    difference = update_difference(before, (change, change + 2.0**-23))
    assert (difference.bit_equal, difference.relative, difference.tolerance) == (False, 0.125, 5e-3 + 0.125)
    assert not difference.exceeds


def test_an_update_no_larger_than_the_rounding_of_storing_is_not_judged() -> None:
    """A frozen norm at a learning rate of 1e-7 passed with a margin of 447,393."""
    before = torch.full((4,), 1.0)
    change = torch.full((4,), 2.0**-23)
    difference = update_difference(before, (change, torch.zeros(4)))
    assert (difference.relative, difference.tolerance, difference.is_judged) == (1.0, 5e-3 + 1.0, False)


def test_elements_whose_gradient_is_rounding_have_no_say_and_are_counted() -> None:
    """Softmax is blind to a key bias: its gradient is rounding, and Adam makes a full step of either sign of it."""
    before = torch.zeros(4)
    change = (torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, -1.0, 1.0]))
    gradients = (torch.tensor([0.5, 0.5, 1e-9, 0.5]), torch.tensor([0.5, 0.5, -1e-9, 0.504]))
    difference = update_difference(before, change, gradients)
    assert (difference.relative, difference.num_excluded, difference.max_abs) == (0.0, 1, 2.0)
    assert update_difference(before, change).exceeds


def write_trace(folder: Path, tensors: dict[str, torch.Tensor], *, step: int = 0) -> None:
    spec = whole("w", (1,))
    entries = [
        TraceEntry(update=0, kind=kind, spec=spec, tensor=tensors[kind]) for kind in TRACE_KINDS if kind in tensors
    ]
    save_rank_trace(folder, step=step, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)


BF16_STEP = {
    "initial": torch.zeros(1),
    "gradient": torch.ones(1),
    "parameter": torch.tensor([1.0 + 2.0**-12]),
    "weight": torch.ones(1, dtype=torch.bfloat16),
}


def test_weights_that_are_not_the_rounded_parameters_are_found_in_each_run(tmp_path: Path) -> None:
    write_trace(tmp_path / "a", BF16_STEP)
    write_trace(tmp_path / "b", BF16_STEP)
    assert compare(tmp_path).findings == ()
    stale = {**BF16_STEP, "weight": torch.zeros(1, dtype=torch.bfloat16)}
    write_trace(tmp_path / "c", stale)
    with open_trace(tmp_path / "a") as baseline, open_trace(tmp_path / "c") as candidate:
        (finding,) = compare_traces(baseline, candidate, bounds=BOUNDS).findings
    assert describe_finding(finding) == (
        "weight of w at step 0, update 0 is the rounded parameter of before the update in the candidate: what the "
        "optimizer updated was not copied to the model, or to another rank's shard of it"
    )
    write_trace(tmp_path / "d", {**BF16_STEP, "weight": torch.full((1,), 2.0, dtype=torch.bfloat16)})
    with open_trace(tmp_path / "a") as baseline, open_trace(tmp_path / "d") as candidate:
        (finding,) = compare_traces(baseline, candidate, bounds=BOUNDS).findings
    assert describe_finding(finding) == (
        "weight of w at step 0, update 0 is not the rounded parameter in the candidate: the model computes with other "
        "weights"
    )


def test_runs_that_start_from_other_weights_are_found(tmp_path: Path) -> None:
    write_trace(tmp_path / "a", BF16_STEP)
    write_trace(tmp_path / "b", {**BF16_STEP, "initial": torch.tensor([2.0**-30])})
    (finding,) = compare(tmp_path).findings
    assert describe_finding(finding) == (
        "parameter of w before step 0 differs: baseline is zero, candidate is not; both runs must start from the same "
        "weights, to the last bit"
    )


def test_an_update_without_the_parameter_before_it_cannot_be_judged(tmp_path: Path) -> None:
    for side, value in (("a", 1.0), ("b", 1.0 + 2.0**-12)):
        write_trace(tmp_path / side, {"gradient": BF16_STEP["gradient"], "parameter": torch.tensor([value])})
    (finding,) = compare(tmp_path).findings
    assert describe_finding(finding) == (
        "parameter of w at step 0, update 0 was traced without the parameter before it, so its update cannot be judged"
    )


def test_the_keys_of_a_step_are_listed_twice_per_run_whatever_their_number(tmp_path: Path) -> None:
    """They were listed anew for every tensor, so that 400 parameters took 14 times as long as 100."""
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(20)]
    for side in ("a", "b"):
        save(tmp_path / side, {name: torch.ones(1) for name in names})
    num_listings: list[int] = []

    class CountingReader(TraceReader):
        def keys(self, step: int) -> frozenset[TraceKey]:
            num_listings.append(step)
            return super().keys(step)

    with open_trace(tmp_path / "a") as baseline, open_trace(tmp_path / "b") as candidate:
        counted = [CountingReader(reader._steps) for reader in (baseline, candidate)]
        compared = compare_traces(*counted, bounds=BOUNDS)
        for reader in counted:
            reader.close()
    assert num_listings == [0, 0, 0, 0]
    assert [difference.key.name for difference in compared.differences] == names * 2
