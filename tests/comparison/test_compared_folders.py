"""Recordings, traces and metrics without a run: exit codes, texts and the bounds that apply."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.commands.compare import CompareOptions, run_compare, run_replicas
from mock_scheduler.comparison.pairing.selection import EVERYTHING
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.console import Console
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.run_folder.inputs import parse_selection
from mock_scheduler.trace.entries import LedgerCall, RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import whole
from tests.rank_traces import save_rank_trace
from tests.recording.builders import make_batch, make_info
from tests.recording.recordings import open_writer

NAME = "decoder.final_layernorm.weight"


def compare(baseline: Path, candidate: Path, **options: object) -> tuple[int, str]:
    """Exit code and what is printed, in one line."""
    output = io.StringIO()
    code = run_compare(
        baseline,
        candidate,
        CompareOptions(**options),
        console=Console(file=output, width=200),  # type: ignore[arg-type]
    )
    return code, " ".join(output.getvalue().split())


def record(folder: Path, batches: Sequence[RolloutBatch], *, first_step: int = 0) -> Path:
    writer = open_writer(folder)
    for step, batch in enumerate(batches, start=first_step):
        writer.write_step(batch, make_info(step, run_id=writer.run_id))
    writer.close()
    return folder


def write_trace(
    folder: Path,
    tensors: Sequence[tuple[TraceKind, str, torch.Tensor]],
    *,
    ledgers: Sequence[Sequence[LedgerCall]] = ((),),
) -> Path:
    """One step; each rank holds all tensors, and has its own calls of collectives."""
    for rank, calls in enumerate(ledgers):
        place = RankPlace(global_rank=rank, coordinates={"tp": rank})
        sink = FullSink(folder, step=0, place=place, world_size=len(ledgers))
        for kind, name, tensor in tensors:
            sink.add(TraceEntry(update=0, kind=kind, spec=whole(name, tuple(tensor.shape)), tensor=tensor))
        kept = {"collective": tuple(calls)} if calls else {}
        sink.close(StepFooter(ranks=tuple(range(len(ledgers))), ledgers=kept))  # type: ignore[arg-type]
    return folder


def write_metrics(folder: Path, *values: object) -> Path:
    folder.mkdir()
    rows = [json.dumps({"step": step, "metrics": {"pg_loss": value}}) for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_equal_recordings_are_identical(tmp_path: Path) -> None:
    sides = [record(tmp_path / name, [make_batch(seed=0), make_batch(seed=1)]) for name in "ab"]
    code, text = compare(*sides)
    assert code == 0
    assert "identical: b against a" in text
    assert "bit-equal: 2 steps; one changed bit would be found" in text


def test_a_changed_row_of_a_recording_is_named_with_its_step(tmp_path: Path) -> None:
    changed = make_batch(seed=1)
    changed.rollout_logprobs[3] -= 0.5
    sides = (
        record(tmp_path / "a", [make_batch(seed=0), make_batch(seed=1)]),
        record(tmp_path / "b", [make_batch(seed=0), changed]),
    )
    code, text = compare(*sides, json_path=str(tmp_path / "verdict.json"))
    assert code == 1
    assert "diverged: b against a" in text
    result = json.loads((tmp_path / "verdict.json").read_text())
    first = result["first_divergence"]
    assert (first["kind"], first["step"]) == ("recording", 1)
    assert "logprobs" in first["message"]


def test_recordings_of_other_rows_are_diverged(tmp_path: Path) -> None:
    sides = [record(tmp_path / name, [make_batch(seed=seed)]) for seed, name in enumerate("ab")]
    assert compare(*sides)[0] == 1


def test_recordings_without_a_common_step_are_incomparable(tmp_path: Path) -> None:
    sides = [record(tmp_path / name, [make_batch(seed=0)], first_step=step) for step, name in enumerate("ab")]
    code, text = compare(*sides)
    assert code == 3
    assert "nothing was compared: no step is in both recordings" in text


def test_the_page_is_written_with_verdict_and_tensor(tmp_path: Path) -> None:
    sides = [write_trace(tmp_path / name, [("gradient", NAME, torch.full((4,), value))]) for name, value in AB]
    code, text = compare(*sides, html_path=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert code == 1
    assert str(tmp_path / "page.html") in text.replace(" ", "")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert NAME in page
    assert "diverged" in page


AB = (("a", 1.0), ("b", 1.5))


@pytest.mark.parametrize(("num_elements", "code"), [(8, 0), (16, 1)])
def test_ranks_of_one_group_must_issue_the_same_collectives(tmp_path: Path, num_elements: int, code: int) -> None:
    def call(count: int) -> LedgerCall:
        return LedgerCall(operation="all_reduce", group=(0, 1), dtype="float32", num_elements=count)

    trace = write_trace(
        tmp_path / "a",
        [("gradient", NAME, torch.ones(4))],
        ledgers=[[call(4), call(8)], [call(4), call(num_elements)]],
    )
    output = io.StringIO()
    assert run_replicas(trace, EVERYTHING, console=Console(file=output, width=200)) == code
    text = " ".join(output.getvalue().split())
    difference = (
        "step 0: group [0, 1], collective 1 is all_reduce of 8 float32 over ranks 0, 1 in global rank 0 (tp0), and "
        "all_reduce of 16 float32 over ranks 0, 1 in global rank 1 (tp1)"
    )
    assert (difference in text) == (code == 1)


def test_bounds_that_are_not_stated_are_those_of_theory_and_say_so(tmp_path: Path) -> None:
    """bfloat16 needed all bounds stated. Now ε is 2^-7 there, and one layer before the end leaves 12 · 1.03 · 2^-7."""
    for name, value in (("a", 1.0), ("b", 1.0 + 2.0**-4), ("c", 1.125)):
        tensor = torch.full((4,), value, dtype=torch.bfloat16)
        write_trace(tmp_path / name, [("activation", NAME, tensor)])
    code, text = compare(tmp_path / "a", tmp_path / "b")
    assert code == 2  # a difference that nothing shows to be rounding
    assert "the noise was not measured, so nothing shows that the difference is rounding" in text
    assert "within uncalibrated bounds of theory: 1 activation" in text
    assert "to calibrate, run the baseline again, replaying its recording, with perturbation.seed=1" in text
    code, text = compare(tmp_path / "a", tmp_path / "c", tolerance=("activation=1e-3",))
    assert code == 0  # 16 units in the last place of values of size 1 are 0.125
    assert "Stated: ||a-b|| / ||a|| of what the forward pass computes at most 0.001; each beyond rounding" in text
    assert "All else: Uncalibrated" in text


@pytest.mark.parametrize(("dtype", "code"), [(torch.float64, 1), (torch.float32, 2)])
def test_the_bounds_of_a_trace_follow_its_precision(tmp_path: Path, dtype: torch.dtype, code: int) -> None:
    """Apart by what only float32's bound allows: 12 · 1.03 · 2^-23 is 1.5e-6, beside 1.9e-6 of rounding."""
    values = torch.ones(4, dtype=dtype)
    moved = values * (1.0 + 1e-6)
    sides = [
        write_trace(tmp_path / name, [("activation", NAME, tensor)]) for name, tensor in (("a", values), ("b", moved))
    ]
    assert compare(*sides)[0] == code


def test_an_activation_of_nothing_but_rounding_is_held_to_the_size_of_its_kind(tmp_path: Path) -> None:
    """A mean that cancels: 2^-24 of what is of size 1, and of the other sign in another order of sums."""
    rest = torch.ones(1024)
    for name, noise in (("a", 2.0**-24), ("b", -(2.0**-24)), ("c", 2.0**-12)):
        tensors: list[tuple[TraceKind, str, torch.Tensor]] = [
            ("activation", "decoder.layers.0", rest),
            ("activation", "decoder.layers.0.mlp", torch.full((4,), noise)),
        ]
        write_trace(tmp_path / name, tensors)
    assert compare(tmp_path / "a", tmp_path / "b")[0] == 2  # within its bound, which is of theory
    code, text = compare(tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert "step 0, update 0, forward: activation of decoder.layers.0.mlp differs by" in text


@pytest.mark.parametrize(
    ("steps", "kinds", "patterns", "chosen"),
    [
        (None, ("logits",), (), "kinds logits"),
        (None, (), ("decoder.layers.99.*",), "names decoder.layers.99.*"),
        ("0", ("gradient",), ("x",), "steps 0, kinds gradient, names x"),
    ],
)
def test_a_choice_of_nothing_is_no_comparison_and_is_named(
    tmp_path: Path, steps: str | None, kinds: tuple[str, ...], patterns: tuple[str, ...], chosen: str
) -> None:
    sides = [write_trace(tmp_path / name, [("gradient", NAME, torch.ones(4))]) for name in "ab"]
    ranges = None if steps is None else StepRanges.parse(steps)
    selection = parse_selection(steps=ranges, kinds=kinds, patterns=patterns)
    code, text = compare(*sides, selection=selection)
    assert code == 3
    assert f"nothing was compared: neither side has anything of the chosen {chosen}" in text


def test_metrics_of_two_folders_are_compared_and_a_choice_of_no_step_is_named(tmp_path: Path) -> None:
    sides = [write_metrics(tmp_path / name, 0.5, value) for name, value in AB]
    code, text = compare(*sides)
    assert code == 2  # of metrics alone, nothing is known that would bound them
    assert "pg_loss from step 1 on: relative difference up to" in text
    assert "beyond an estimated bound only; beyond uncalibrated bounds of theory: 1 of" in text
    code, text = compare(*sides, tolerance=("metric=1e-4",))
    assert code == 1
    assert "pg_loss from step 1 on: relative difference up to 0.333, |a-b| 3.33e+03 times its bound of 0.00015" in text
    assert compare(sides[0], sides[1] / "metrics.jsonl", selection=parse_selection(steps=StepRanges.parse("0")))[0] == 0
    with pytest.raises(ConfigError) as caught:
        compare(*sides, selection=parse_selection(steps=StepRanges.parse("5")))
    assert str(caught.value) == "steps 5: there is no such step; a has steps 0-1; b has steps 0-1"


@pytest.mark.parametrize(("mine", "other", "code"), [("nan", "nan", 3), ("nan", 0.5, 1), (0.5, "nan", 1)])
def test_a_metric_that_is_nan_on_one_side_diverges(tmp_path: Path, mine: object, other: object, code: int) -> None:
    sides = [write_metrics(tmp_path / name, value) for name, value in (("a", mine), ("b", other))]
    assert compare(*sides)[0] == code


def test_a_torn_last_line_of_metrics_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides = [write_metrics(tmp_path / name, 0.5, 0.25) for name in "ab"]
    path = sides[1] / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    code, text = compare(*sides)
    assert code == 1
    assert "step 1 is not logged by the candidate" in text or "step 1" in text
    assert f"{path}: its last line was not written to its end; these 33 bytes were passed over" in caplog.messages


@pytest.mark.parametrize("is_last", [False, True])
def test_a_broken_line_of_metrics_is_refused_with_its_number(tmp_path: Path, is_last: bool) -> None:
    sides = [write_metrics(tmp_path / name, 0.5, 0.25, 0.125) for name in "ab"]
    path = sides[1] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    place = 2 if is_last else 1
    lines[place] = lines[place][:-9]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=rf"metrics.jsonl:{place + 1}: not JSON \(.*\); the run may have been cut off"):
        compare(*sides)


def test_replicas_checks_every_digest_on_request(tmp_path: Path) -> None:
    """The full check of a trace was there, and no command reached it."""
    path = save_rank_trace(
        tmp_path / "trace",
        step=0,
        global_rank=0,
        world_size=1,
        coordinates={"tp": 0},
        entries=[TraceEntry(update=0, kind="gradient", spec=whole("w", (2,)), tensor=torch.ones(2))],
    )
    console = Console(file=io.StringIO(), width=200)
    assert run_replicas(tmp_path / "trace", EVERYTHING, console=console, verify=True) == 3  # nothing is held twice
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TraceError, match="does not match its digest"):
        run_replicas(tmp_path / "trace", EVERYTHING, console=console, verify=True)
