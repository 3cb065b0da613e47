"""Nothing passes on less than was asked for: choices without a tensor, absent steps, empty inputs, values that prove
nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.api.compare import check_replicas, compare
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.recording.inspection.verification import verify_recording
from mock_scheduler.trace.entries import StepFooter
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.verdict import VerdictKind
from tests.commands.test_compare import Runs
from tests.recording.builders import make_batch, make_info
from tests.recording.recordings import open_writer
from tests.trace.builders import entry, save

NAME = "decoder.final_layernorm.weight"
OTHER = "decoder.layers.0.mlp.linear_fc1.weight"


def write(
    folder: Path,
    *names: str,
    kind: TraceKind = "gradient",
    steps: Sequence[int] = (0,),
    value: float = 1.0,
    size: int = 4,
) -> Path:
    """A trace of one rank; of steps 0 and later."""
    for step in steps:
        entries = [entry(whole(name, (size,)), torch.full((size,), value), kind=kind) for name in names]
        save(folder, 0, 1, entries, step=step)
    return folder


def both(folder: Path, *names: str, **options: object) -> tuple[Path, Path]:
    first, second = (write(folder / side, *names, **options) for side in "ab")  # type: ignore[arg-type]
    return first, second


def write_metrics(folder: Path, *rows: object) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "metrics": metrics}) for step, metrics in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def record(folder: Path, *steps: int) -> Path:
    writer = open_writer(folder)
    for step in steps:
        writer.write_step(make_batch(seed=step), make_info(step, run_id=writer.run_id))
    writer.close()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    made = Runs(tmp_path)
    return made.make("base"), made.make("new")


# --- Choices ----------------------------------------------------------------------------------------------------------


def test_a_pattern_without_a_tensor_does_not_pass_on_metrics(runs: tuple[Path, Path]) -> None:
    """Two runs were identical by their metrics, whatever the pattern was."""
    assert compare(*runs).passes
    verdict = compare(*runs, patterns="decoder.final_layernorn.*")
    assert verdict.exit_code == ExitCode.INCOMPARABLE
    assert "no tensor was compared: neither side has anything of the chosen names decoder.final_layernorn.*" in (
        verdict.describe()
    )
    assert (
        "chosen by pattern 'decoder.final_layernorn.*'; the nearest are decoder.final_layernorm" in verdict.describe()
    )


def test_a_kind_without_a_tensor_does_not_pass_on_metrics(runs: tuple[Path, Path]) -> None:
    verdict = compare(*runs, kinds="logits")
    assert verdict.exit_code == ExitCode.INCOMPARABLE
    assert (
        "nothing of both sides is chosen by kind 'logits'; they have gradient, initial, parameter" in verdict.describe()
    )


def test_each_of_several_patterns_must_choose_something(tmp_path: Path) -> None:
    sides = both(tmp_path, NAME, OTHER)
    assert compare(*sides, patterns=["decoder.final*", "*fc1*"]).kind is VerdictKind.IDENTICAL
    verdict = compare(*sides, patterns=["decoder.final*", "*fc3*"])
    assert verdict.kind is VerdictKind.INCOMPARABLE
    assert verdict.describe().endswith(f"chosen by pattern '*fc3*'; the nearest are {NAME}, {OTHER}")


def test_each_of_several_kinds_must_choose_something(tmp_path: Path) -> None:
    sides = both(tmp_path, NAME)
    assert compare(*sides, kinds=["gradient", "collective"]).kind is VerdictKind.INCOMPARABLE
    assert compare(*sides, kinds=["gradient"]).kind is VerdictKind.IDENTICAL


def test_a_pattern_of_another_kind_chooses_nothing(tmp_path: Path) -> None:
    sides = both(tmp_path, NAME)
    for side in sides:
        save(side, 0, 1, [entry(whole(OTHER, (2,)), torch.ones(2), kind="activation")], step=1)
    verdict = compare(*sides, kinds="gradient", patterns=[NAME, OTHER])
    assert (verdict.kind, OTHER in verdict.describe()) == (VerdictKind.INCOMPARABLE, True)


def test_a_divergence_counts_whatever_else_was_chosen(tmp_path: Path) -> None:
    sides = write(tmp_path / "a", NAME), write(tmp_path / "b", NAME, value=2.0)
    assert compare(*sides, patterns=[NAME, "x"]).kind is VerdictKind.DIVERGED


def test_replicas_of_an_unmatched_choice_do_not_agree(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path, rank, 2, [entry(whole(NAME, (2,)), torch.ones(2))])
    assert check_replicas(tmp_path).exit_code == ExitCode.ALIGNED
    for choice in ({"patterns": [NAME, "x"]}, {"kinds": ["gradient", "logits"]}):
        result = check_replicas(tmp_path, **choice)  # type: ignore[arg-type]
        assert (result.exit_code, len(result.unmatched)) == (ExitCode.INCOMPARABLE, 1)


@pytest.mark.parametrize("choice", [{"kinds": "gradient"}, {"patterns": "x"}])
def test_tensors_cannot_be_chosen_of_metrics_or_recordings(tmp_path: Path, choice: dict[str, str]) -> None:
    """The choice was passed over, and everything compared."""
    metrics = [write_metrics(tmp_path / f"m{side}", {"loss": 1.0}) for side in "ab"]
    recordings = [record(tmp_path / side, 0) for side in "ab"]
    for sides in (metrics, recordings):
        with pytest.raises(ConfigError, match="no tensors to choose; leave out --"):
            compare(*sides, **choice)  # type: ignore[arg-type]


# --- Steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "absent"), [("0,7", "there is no step 7"), ("0-4", "there is no step 4"), ("0,3,9-", "no step 3, 9-")]
)
def test_every_chosen_end_of_steps_must_be_there(tmp_path: Path, steps: str, absent: str) -> None:
    """One present step of all chosen ones was enough."""
    traces = both(tmp_path / "traces", NAME, steps=(0, 2))
    recordings = record(tmp_path / "ra", 0, 2), record(tmp_path / "rb", 0, 2)
    for sides in (traces, recordings):
        with pytest.raises(ConfigError, match=absent):
            compare(*sides, steps=steps)
        assert compare(*sides, steps="0-2").passes
        assert compare(*sides, steps="1-").passes


def test_a_chosen_end_of_steps_must_be_in_the_metrics(tmp_path: Path) -> None:
    metrics = [write_metrics(tmp_path / side, *[{"loss": 1.0}] * 3) for side in "ab"]
    with pytest.raises(ConfigError, match="there is no step 9"):
        compare(*metrics, steps="1-9")
    assert compare(*metrics, steps="1,2").passes


def test_verify_finds_that_a_chosen_step_is_not_there(tmp_path: Path) -> None:
    folder = str(record(tmp_path / "a", 0, 1))
    assert problems_of(folder, "0-1") == ()
    assert problems_of(folder, "0,5") == (
        f"of the steps 0, 5, step 5 is not recorded in {folder}; steps present: train 0-1",
    )


def problems_of(folder: str, steps: str) -> tuple[str, ...]:
    return verify_recording(folder, StepRanges.parse(steps)).problems


def test_a_recording_without_steps_is_not_whole_and_equals_no_other(tmp_path: Path) -> None:
    sides = [record(tmp_path / side, 0) for side in "ab"]
    for path in tmp_path.rglob("step_*"):
        path.unlink()
    assert verify_recording(str(sides[0])).problems == (f"{sides[0]} holds no step",)
    assert compare(*sides).exit_code == ExitCode.INCOMPARABLE


def test_a_side_with_fewer_traced_steps_diverges_and_is_named(tmp_path: Path) -> None:
    sides = write(tmp_path / "a", NAME, steps=(0, 1)), write(tmp_path / "b", NAME, steps=(0,))
    for pair, side in ((sides, "baseline"), (sides[::-1], "candidate")):
        verdict = compare(*pair)
        assert verdict.exit_code == ExitCode.DIVERGED
        assert f"step 1 was traced by the {side} but not by the" in verdict.describe()


def test_traces_without_a_common_step_are_incomparable(tmp_path: Path) -> None:
    sides = write(tmp_path / "a", NAME, steps=(0,)), write(tmp_path / "b", NAME, steps=(1,))
    assert not compare(*sides).passes


def test_a_step_that_is_only_in_the_metrics_does_not_pass_without_a_trace(runs: tuple[Path, Path]) -> None:
    for side in runs:
        with (side / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 9, "metrics": {"pg_loss": 0.5}}\n')
    verdict = compare(*runs, steps="9", kinds="gradient")
    assert verdict.exit_code == ExitCode.INCOMPARABLE


# --- Values -----------------------------------------------------------------------------------------------------------


def test_traces_without_a_tensor_or_an_element_are_incomparable(tmp_path: Path) -> None:
    for side in "ab":
        save(tmp_path / f"empty_{side}", 0, 1, [], footer=StepFooter())
    assert compare(tmp_path / "empty_a", tmp_path / "empty_b").exit_code == ExitCode.INCOMPARABLE
    assert compare(*both(tmp_path, NAME, size=0)).exit_code == ExitCode.INCOMPARABLE
    assert compare(*both(tmp_path / "x", NAME, size=0), kinds="gradient").exit_code == ExitCode.INCOMPARABLE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_without_a_number_are_incomparable(tmp_path: Path, value: float) -> None:
    assert compare(*both(tmp_path, NAME, value=value)).exit_code == ExitCode.INCOMPARABLE
    assert compare(*both(tmp_path / "x", NAME, kind="activation", value=value)).exit_code == ExitCode.INCOMPARABLE


def test_metrics_without_a_number_are_incomparable(tmp_path: Path) -> None:
    sides = [
        write_metrics(tmp_path / side, {"loss": "nan", "kl": "inf"}, {"loss": "nan", "kl": "inf"}) for side in "ab"
    ]
    verdict = compare(*sides)
    assert verdict.exit_code == ExitCode.INCOMPARABLE
    assert "no finite metric was compared: the rest proves nothing" in verdict.describe()
    sides = [write_metrics(tmp_path / f"x{side}", {"loss": "nan"}, {"loss": 1.0}) for side in "ab"]
    assert compare(*sides).passes


@pytest.mark.parametrize("metrics", [{}, {"time/step": 1.0}])
def test_metrics_without_one_to_compare_are_incomparable(tmp_path: Path, metrics: dict[str, float]) -> None:
    sides = [write_metrics(tmp_path / side, metrics) for side in "ab"]
    assert compare(*sides).exit_code == ExitCode.INCOMPARABLE


def test_metrics_of_other_names_do_not_pass(tmp_path: Path) -> None:
    sides = [write_metrics(tmp_path / name, {name: 1.0}) for name in "ab"]
    assert not compare(*sides).passes


def test_initial_parameters_that_are_equal_to_the_bit_are_something_compared(tmp_path: Path) -> None:
    """They have no number of their own, so that a comparison of them alone was none."""
    equal = both(tmp_path, NAME, kind="initial")
    assert compare(*equal, kinds="initial").kind is VerdictKind.IDENTICAL
    assert compare(*equal).kind is VerdictKind.INCOMPARABLE
    sides = write(tmp_path / "x", NAME, kind="initial"), write(tmp_path / "y", NAME, kind="initial", value=2.0)
    assert not compare(*sides, kinds="initial").passes


def test_runs_that_state_no_rollouts_in_common_are_incomparable(runs: tuple[Path, Path]) -> None:
    """Equal rollouts were taken for granted where one run stated none."""
    stated = json.loads((runs[1] / "run.json").read_text())
    (runs[1] / "run.json").write_text(json.dumps({**stated, "batches": {}}))
    verdict = compare(*runs)
    assert verdict.exit_code == ExitCode.INCOMPARABLE
    assert "the two runs state the rollouts of no common step" in verdict.describe()
