"""What the walk hands to the classifiers: the tensor of the update before, integers, and nothing within its bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.names import FINAL_NORM, WORD_EMBEDDINGS
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.wording.residuals import describe_residual
from tests.comparison.stated import stated

NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def noise(seed: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


def write(
    folder: Path, steps: list[torch.Tensor], *, kind: TraceKind = "gradient", name: str = NAME, dp: int = 1
) -> Path:
    for step, tensor in enumerate(steps):
        for rank in range(dp):
            place = RankPlace(global_rank=rank, coordinates={"dp": rank})
            sink = FullSink(folder, step=step, place=place, world_size=dp)
            sink.add(TraceEntry(update=0, kind=kind, spec=whole(name, tuple(tensor.shape)), tensor=tensor))
            sink.close(StepFooter(ranks=tuple(range(dp)), update_rows=((),)))
    return folder


def differences(baseline: Path, candidate: Path) -> tuple[TensorDifference, ...]:
    return compare_trace_folders(baseline, candidate, bounds=stated()).differences


def test_a_gradient_of_the_step_before_is_stale(tmp_path: Path) -> None:
    first, second = noise(0), noise(1)
    found = differences(write(tmp_path / "a", [first, second]), write(tmp_path / "b", [first, first]))
    assert found[0].residual is None
    assert found[1].residual is not None
    assert (found[1].residual.kind, describe_residual(found[1].residual)) == (
        "stale",
        "candidate is the baseline's tensor of the update before",
    )


def test_tokens_and_masks_that_are_shifted_are_called_so(tmp_path: Path) -> None:
    tokens = torch.randint(0, 1000, (40,), generator=torch.Generator().manual_seed(0))
    sides = [write(tmp_path / name, [side], kind="input", name="tokens") for name, side in moved(tokens)]
    (found,) = differences(sides[0], sides[1])
    assert found.residual is not None
    assert (found.residual.kind, found.residual.value) == ("shift", 1.0)


def moved(tokens: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [("a", tokens), ("b", tokens.roll(1))]


def test_numbers_of_chosen_experts_are_names_and_have_no_ratio(tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.router.chosen_experts"
    chosen = torch.randint(1, 8, (64, 2), generator=torch.Generator().manual_seed(0)).sort().values
    baseline = write(tmp_path / "a", [chosen], kind="router", name=name)
    (found,) = differences(baseline, write(tmp_path / "b", [2 * chosen], kind="router", name=name))
    assert found.exceeds
    assert found.residual is not None
    assert (found.residual.kind, found.residual.value) == ("choice", 64.0)
    assert describe_residual(found.residual).startswith("64 of 64 tokens go to other experts")


def test_what_is_within_its_bound_is_not_explained(tmp_path: Path) -> None:
    values = noise(0)
    (found,) = differences(write(tmp_path / "a", [values]), write(tmp_path / "b", [values * (1 + 1e-6)]))
    assert (found.tier, found.residual, found.localities) == ("tolerance", None, ())
    assert found.figures is not None
    assert found.figures.worst is not None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gradient", "candidate is 1.414 times the baseline: √dp"),
        ("advantage", "candidate is 1.414 times the baseline"),
    ],
)
def test_what_is_made_of_the_whole_batch_has_no_factor_of_the_layout(
    kind: TraceKind, text: str, tmp_path: Path
) -> None:
    """Advantages divided by a deviation with n in place of n - 1 were called √dp."""
    baseline = write(tmp_path / "a", [noise(0)], kind=kind, dp=2)
    (found,) = differences(baseline, write(tmp_path / "b", [noise(0) * 2**0.5], kind=kind, dp=2))
    assert found.residual is not None
    assert describe_residual(found.residual) == text


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((0.0, 1.0), "the part of the output layer is missing from the candidate"),
        ((2.0, 1.0), "the part of the output layer is in the candidate once more"),
        ((1.0, 0.0), "the part of the look-up is missing from the candidate"),
        ((1.0, 1.5), None),
    ],
)
def test_a_part_of_a_tied_embeddings_gradient_is_named_by_what_makes_it(
    weights: tuple[float, float], text: str | None, tmp_path: Path
) -> None:
    """As a pipeline's last stage makes one, and loses it; all gradients are divided by the number of tokens."""
    hidden, slopes, look_up = noise(0)[:, :4], noise(1), torch.zeros(8, 4)
    look_up[[1, 3, 6]] = noise(2)[:3, :4]
    output = slopes.T @ hidden / 16
    folders = []
    for name, (first, second) in (("a", (1.0, 1.0)), ("b", weights)):
        sink = FullSink(tmp_path / name, step=0, place=RankPlace(global_rank=0, coordinates={"pp": 0}), world_size=1)
        kinds: tuple[tuple[TraceKind, str, torch.Tensor], ...] = (
            ("activation", FINAL_NORM, hidden),
            ("activation_gradient", "output_layer", slopes),
            ("gradient", WORD_EMBEDDINGS, first * output + second * look_up),
        )
        for kind, of, tensor in kinds:
            sink.add(TraceEntry(update=0, kind=kind, spec=whole(of, tuple(tensor.shape)), tensor=tensor))
        sink.close(StepFooter(ranks=(0,), update_rows=((),)))
        folders.append(tmp_path / name)
    found = next(item for item in differences(*folders) if item.key.kind == "gradient")
    said = None if found.residual is None else describe_residual(found.residual)
    assert said == text


def test_a_doubled_change_of_a_parameter_is_no_number_of_the_layout(tmp_path: Path) -> None:
    """A doubled learning rate was called √micro-batches, of which there were four."""
    before, change = noise(0), noise(1) * 1e-2
    folders = []
    for name, scale in (("a", 1.0), ("b", 2.0)):
        sink = FullSink(tmp_path / name, step=0, place=RankPlace(global_rank=0, coordinates={"tp": 0}), world_size=1)
        kinds: tuple[tuple[TraceKind, torch.Tensor], ...] = (
            ("initial", before),
            ("parameter", before + scale * change),
        )
        for kind, tensor in kinds:
            sink.add(TraceEntry(update=0, kind=kind, spec=whole(NAME, (16, 8)), tensor=tensor))
        sink.close(StepFooter(ranks=(0,), update_rows=((),)))
        folders.append(tmp_path / name)
    (found,) = differences(*folders)
    assert found.residual is not None
    assert describe_residual(found.residual) == (
        "of the change by the update: candidate is 2.000 times the baseline, as another learning rate or count of "
        "updates makes it"
    )
