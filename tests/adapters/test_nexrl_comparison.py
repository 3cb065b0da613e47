"""The comparison of debug dumps. The numbered tests are the faults of NexRL's own script, none of which is here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.nexrl.comparison.pairing import Item
from mock_scheduler.adapters.nexrl.comparison.report import (
    MAX_JSON_ITEMS,
    StepReport,
    compare_dumps,
    render_report,
    report_as_json,
)
from mock_scheduler.adapters.nexrl.comparison.sections import Dumps, Section
from mock_scheduler.adapters.nexrl.comparison.values import Tolerance, compare_numbers, compare_tensors
from mock_scheduler.adapters.nexrl.files import save_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey
from mock_scheduler.adapters.nexrl.records import trajectory_content
from mock_scheduler.adapters.nexrl.remote import build_datums
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.compare_debug_dumps import main
from tests.batches import make_batch

Content = dict[str, Any]
PADDING = 99.0
LENGTHS = {"s0": 2, "s1": 3, "s2": 1, "s3": 2}


def value_of(sample: str, position: int) -> float:
    """One number per token, whatever file it is in."""
    return -(int(sample[1]) + 1) / 8 - position / 64


def micro_batch(samples: Sequence[str], *, width: int = 4, identities: bool = True) -> Content:
    """A micro-batch of one line per sample, its tokens at positions from 1; padding holds rubbish."""
    shape = (len(samples), width)
    mask, values = torch.zeros(shape, dtype=torch.bool), torch.full(shape, PADDING)
    index, positions = torch.full(shape, -1), torch.ones(shape, dtype=torch.int64)
    for line, sample in enumerate(samples):
        for column in range(LENGTHS[sample]):
            mask[line, column], values[line, column] = True, value_of(sample, column + 1)
            index[line, column], positions[line, column] = line, column + 1
    chosen = values[mask].double().tolist()
    content: Content = {
        "log_probs": values,
        "entropy": -values,
        "response_mask": mask,
        "loss": math.fsum(chosen) / len(chosen),
        "pg_loss": -math.fsum(chosen) / len(chosen),
        "entropy_loss": -math.fsum(chosen) / len(chosen),
        "old_log_probs": values.clone(),
        "advantages": values * 2,
        "prob_ratio": values * 0 + 1,
        "elementwise_loss": values.clone(),
        "elementwise_pg_loss": -values,
        "elementwise_entropy_loss": -values,
        "effective_valid": mask.clone(),
    }
    if identities:
        content |= {"sample_ids": list(samples), "sample_index": index, "positions": positions}
    return content


ONE_RANK = {(0, 0): ("s0", "s1"), (0, 1): ("s2", "s3")}


def write(
    folder: Path,
    layout: Mapping[tuple[int, int], Sequence[str]] = ONE_RANK,
    *,
    step: int = 0,
    kinds: Sequence[DumpKind] = ("forward_data", "loss", "is_loss_debug"),
    **options: Any,
) -> Path:
    """A dump of micro-batches by (rank, micro)."""
    for (rank, micro), samples in layout.items():
        for kind in kinds:
            put(folder, kind, micro_batch(samples, **options), step=step, rank=rank, micro=micro)
    return folder


def put(
    folder: Path, kind: DumpKind, content: Content, *, step: int = 0, rank: int | None = 0, micro: int | None = 0
) -> None:
    key = FileKey(step=step, global_rank=rank, micro=micro)
    save_content(folder, kind, key, content, dump_format="pt", replace=True)


def change(folder: Path, kind: DumpKind, name: str, value: object, *, samples: Sequence[str] = ("s0", "s1")) -> None:
    """Replace one value of rank 0's first micro-batch; None removes it."""
    content = {**micro_batch(samples), name: value}
    if value is None:
        del content[name]
    put(folder, kind, content)


def run(first: Path, second: Path | None, *options: str, step: int = 0) -> int:
    weaver = [] if second is None else ["--weaver_dir", str(second)]
    steps = [] if "--steps" in options else ["--step", str(step)]
    return main(["--self_hosted_dir", str(first), *weaver, *steps, *options])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal dumps."""
    return write(tmp_path / "self"), write(tmp_path / "weaver")


def planted(values: torch.Tensor, cell: tuple[int, int], by: float) -> torch.Tensor:
    changed = values.clone()
    changed[cell] += by
    return changed


def test_equal_dumps_are_identical(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*pair) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Verdict: identical - all 26 comparisons are identical to the bit"
    )


def test_fault_1_the_exit_code_is_the_verdict(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(pair[1], "loss", "loss", micro_batch(("s0", "s1"))["loss"] + 1e-4)
    assert run(*pair) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "Verdict: different - 25 of 26 comparisons hold, 1 do not, 0 are missing",
        "First: LOSS_DATA_ALL, rank0_micro0 loss: ✗ diff=1.000000e-04",
    ]
    assert run(pair[0], None) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("Verdict: nothing compared")
    assert run(tmp_path / "no", pair[1]) == 5
    assert capsys.readouterr().err == (
        f"TraceError: the Self-Hosted dump {tmp_path / 'no'} is no folder; give a run's debug.dump_dir\n"
    )


def test_fault_2_differences_of_tensors_are_shown_and_placed(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    values = planted(micro_batch(("s0", "s1"))["log_probs"], (1, 2), 0.5)
    change(pair[1], "forward_data", "log_probs", values)
    assert run(*pair) == 1
    out = capsys.readouterr().out
    assert "  rank0_micro0 log_probs: ✗ diff=5.000000e-01 mean=1.000000e-01 ulp=" in out
    assert " at s1, token 3\n" in out


def test_fault_3_statuses_are_counted_and_shown(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    change(pair[1], "forward_data", "entropy", None)
    (pair[1] / "forward_data" / "step_000000_rank0_micro1.pt").unlink()
    assert run(*pair) == 3
    out = capsys.readouterr().out
    assert "Values: 2 identical, 2 missing in the second dump\n" in out
    assert "  rank0_micro1 tokens: ✗ missing in the second dump (3 of 3 tokens, the first s2, token 1)\n" in out
    assert "  rank0_micro0 entropy: ✗ missing in the second dump (in the second dump)\n" in out


def test_fault_4_headings_name_their_section(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run(*pair)
    out = capsys.readouterr().out
    for title in ("Forward data", "Loss", "IS loss"):
        assert f"{title} differences across ranks/micros:\n" in out


def test_fault_5_the_loss_file_holds_what_is_loss_debug_is_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NexRL looked for it in a file that never had it, and compared a batch with a micro-batch."""
    first = write(tmp_path / "self", kinds=("loss",))
    second = write(tmp_path / "weaver", kinds=("is_loss_debug", "loss"))
    change(second, "is_loss_debug", "old_log_probs", planted(micro_batch(("s0", "s1"))["old_log_probs"], (0, 0), 1.0))
    assert run(first, second) == 1
    out = capsys.readouterr().out
    for name in ("log_probs", "advantages", "prob_ratio", "elementwise_loss", "effective_valid", "loss"):
        assert f"  rank0_micro0 {name}: ✓ diff=0.000000e+00" in out
    assert "  rank0_micro0 old_log_probs: ✗ diff=1.000000e+00" in out


def test_fault_6_padding_enters_no_figure(pair: tuple[Path, Path], tmp_path: Path) -> None:
    values = micro_batch(("s0", "s1"))["log_probs"]
    values[values == PADDING] = math.nan
    change(pair[1], "forward_data", "log_probs", values)
    assert run(*pair) == 0
    foreign = [write(tmp_path / name, identities=False) for name in ("a", "b")]
    put(foreign[1], "forward_data", {**micro_batch(("s0", "s1"), identities=False), "log_probs": values})
    assert run(*foreign) == 0


@pytest.mark.parametrize("both", [True, False])
def test_fault_7_nan_equals_nan_and_no_number(
    pair: tuple[Path, Path], tmp_path: Path, both: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values = planted(micro_batch(("s0", "s1"))["entropy"], (0, 0), math.nan)
    for folder in pair if both else pair[1:]:
        change(folder, "forward_data", "entropy", values)
    assert run(*pair, "--output", str(tmp_path / "report.json")) == (0 if both else 1)
    text = (tmp_path / "report.json").read_text()
    sections = json.loads(text, parse_constant=pytest.fail)["sections"]
    (found,) = [
        item
        for section in sections
        for item in section["comparisons"]
        if (section["name"], item["place"], item["name"]) == ("forward_data_all", "rank0_micro0", "entropy")
    ]
    expected = (0.0, 0, "identical") if both else ("Infinity", 1, "different")
    assert (found["max_abs"], found["num_nan_mismatches"], found["status"]) == expected
    assert ("NaN against a number: 1 at s0, token 1" in capsys.readouterr().out) is not both


def test_fault_8_empty_and_single_elements_are_compared() -> None:
    tolerance = Tolerance()
    empty = compare_tensors(torch.zeros(0), torch.zeros(0), tolerance)
    assert (empty.status, empty.num_compared, empty.max_abs) == ("identical", 0, None)
    single = compare_tensors(torch.tensor([1.0]), torch.tensor([1.5]), tolerance)
    assert (single.status, single.max_abs, single.mean_abs) == ("different", 0.5, 0.5)


def test_fault_9_nothing_is_narrowed_and_dtypes_are_reported() -> None:
    tolerance = Tolerance()
    ids = compare_tensors(torch.tensor([2**60]), torch.tensor([2**60 + 1]), tolerance)
    assert (ids.status, ids.max_abs) == ("different", 1.0)
    wide = compare_tensors(
        torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0 + 2**-52], dtype=torch.float64), tolerance
    )
    assert (wide.status, wide.max_ulp, wide.max_abs) == ("close", 1, 2**-52)
    mixed = compare_tensors(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0]), tolerance)
    assert (mixed.status, mixed.max_abs, mixed.detail) == ("dtype", 0.0, "bfloat16 against float32")
    assert not mixed.is_ok


def test_fault_10_a_step_that_is_not_there_names_those_that_are(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The default is 1, as documented; a run of one step has step 0 alone."""
    assert main(["--self_hosted_dir", str(pair[0]), "--weaver_dir", str(pair[1])]) == 5
    assert capsys.readouterr().err == (
        f"StepNotFoundError: the Self-Hosted dump {pair[0]} has no step 1; steps there: 0\n"
    )


@pytest.mark.parametrize(
    "layout",
    [
        {(0, 0): ("s0", "s2"), (1, 0): ("s1", "s3")},
        {(3, 0): ("s3", "s2", "s1", "s0")},
        {(0, 0): ("s1",), (0, 1): ("s3",), (1, 0): ("s2",), (1, 1): ("s0",)},
    ],
    ids=["two ranks", "one micro-batch in another order", "one row each"],
)
def test_fault_11_layouts_and_micro_batches_do_not_matter(
    tmp_path: Path, layout: Mapping[tuple[int, int], Sequence[str]]
) -> None:
    first = write(tmp_path / "self")
    second = write(tmp_path / "weaver", layout, width=7)
    report = compare_dumps(first, None, second, 0)
    assert report.exit_code == 0
    assert {item.difference.status for _, item in report.items()} == {"identical"}
    assert report.num_compared == 26


def test_fault_11_extra_ranks_and_micro_batches_are_missing_on_the_other_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "self", {(0, 0): ("s0", "s1")})
    second = write(tmp_path / "weaver", {(0, 0): ("s0", "s1"), (1, 0): ("s2",)})
    assert run(first, second) == 3
    assert "  rank1_micro0 tokens: ✗ missing in the first dump (1 of 1 tokens, the first s2, token 1)" in (
        capsys.readouterr().out
    )
    foreign = [
        write(tmp_path / name, layout, identities=False)
        for name, layout in (("a", {(0, 0): ("s0",)}), ("b", {(0, 0): ("s0",), (0, 1): ("s1",)}))
    ]
    assert run(*foreign) == 3
    assert "  rank0_micro1 file: ✗ missing in the first dump (in the first dump)" in capsys.readouterr().out


def test_fault_11_numbers_of_ranks_that_were_given_must_be_there(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*pair, "--num_ranks", "1", "--num_micros", "2") == 0
    assert "Comparing: 1 ranks × 2 microbatches\n" in capsys.readouterr().out
    assert run(*pair, "--num_ranks", "8") == 3
    assert "ranks: ✗ missing in the first dump (8 were asked for, and the dumps hold 1)" in capsys.readouterr().out


def parameter(value: float, *, name: str = "model.norm.weight") -> Content:
    tensor = torch.full((4,), value)
    piece = {"name": name, "global_shape": [4], "tensor": tensor, "indices": [None], "owned": None}
    return {"param_name": name, "param": tensor, "parameters": [piece]}


def halves(value: float) -> list[Content]:
    """The same on two ranks."""
    return [
        {
            "parameters": [
                {
                    "name": "model.norm.weight",
                    "global_shape": [4],
                    "tensor": torch.full((2,), value),
                    "indices": [torch.tensor([2 * rank, 2 * rank + 1])],
                    "owned": None,
                }
            ]
        }
        for rank in range(2)
    ]


def test_fault_12_parameters_are_compared_as_whole_tensors(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    put(pair[0], "param", parameter(1.0), micro=None)
    for rank, content in enumerate(halves(1.0)):
        put(pair[1], "param", content, rank=rank, micro=None)
    assert run(*pair) == 0
    assert "  update0 model.norm.weight: ✓ diff=0.000000e+00" in capsys.readouterr().out
    put(pair[1], "param", halves(1.25)[1], rank=1, micro=None)
    assert run(*pair) == 1
    assert "  update0 model.norm.weight: ✗ diff=2.500000e-01" in capsys.readouterr().out
    (pair[1] / "param" / "step_000000_rank1.pt").unlink()
    assert run(*pair) == 1
    assert "missing in the second dump (2 of 4 elements are in no rank's file)" in capsys.readouterr().out


def test_fault_12_jsonl_and_ranges_of_steps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "self")
    second = tmp_path / "weaver"
    for step in (0, 1):
        write(first, step=step)
        for (rank, micro), samples in ONE_RANK.items():
            for kind in ("forward_data", "loss", "is_loss_debug"):
                key = FileKey(step=step, global_rank=rank, micro=micro)
                save_content(second, kind, key, micro_batch(samples), dump_format="jsonl")  # type: ignore[arg-type]
    output = tmp_path / "report.json"
    assert run(first, second, "--steps", "0-1", "--output", str(output)) == 0
    assert [step["step"] for step in json.loads(output.read_text())["steps"]] == [0, 1]
    assert capsys.readouterr().out.count("identical to the bit") == 2
    assert run(first, second, "--steps", "0-") == 0
    capsys.readouterr()
    assert run(first, second, "--steps", "0-2") == 5
    assert capsys.readouterr().err == (
        f"StepNotFoundError: the Self-Hosted dump {first} has no step 2; steps there: 0, 1\n"
    )


def test_fault_13_a_missing_file_is_no_empty_one(pair: tuple[Path, Path]) -> None:
    (pair[1] / "loss" / "step_000000_rank0_micro1.pt").unlink()
    report = compare_dumps(pair[0], None, pair[1], 0)
    assert report.exit_code == 3
    assert [
        (section.name, item.place, item.difference.status)
        for section, item in report.items()
        if not item.difference.is_ok
    ] == [("LOSS_DATA_ALL", "rank0_micro1", "missing_second")]


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code was run')",)


def test_fault_14_no_file_runs_code(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = pair[1] / "loss" / "step_000000_rank0_micro0.pt"
    torch.save({"loss": Planted()}, path)
    assert run(*pair) == 5
    said = capsys.readouterr().err
    assert said.startswith(f"TraceError: {path}: {path.stem}/data.pkl names '")
    assert "which is not on the closed list; nothing of it is run" in said


def write_trajectories(folder: Path, batch: RolloutBatch, kind: DumpKind = "trajectory", **options: Any) -> Content:
    content = trajectory_content(batch, step=0, **options)
    put(folder, kind, content, rank=None, micro=None)
    return content


def test_fault_15_trajectories_are_paired_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = make_batch(4, 2)
    write_trajectories(tmp_path / "self", batch)
    content = trajectory_content(batch, step=0)
    content["trajectories"].reverse()
    put(tmp_path / "remote", "prepared_trajectories", content, rank=None, micro=None)
    arguments = ["--self_hosted_dir", str(tmp_path / "self"), "--remote_api_dir", str(tmp_path / "remote")]
    assert main([*arguments, "--step", "0"]) == 0
    assert "--- TRAJECTORIES ---\nTotal comparisons: 8\n" in capsys.readouterr().out
    # Beyond the fifth, of which NexRL looked at none; and a reward, which it did not compare.
    content["trajectories"][0]["reward"] += 0.5
    content["trajectories"][1]["loss_mask"][-1] = 0
    del content["trajectories"][2]
    put(tmp_path / "remote", "prepared_trajectories", content, rank=None, micro=None)
    assert main([*arguments, "--step", "0"]) == 1
    out = capsys.readouterr().out
    assert "default/group 3/episode 0/env 1/turn 0 reward: ✗ diff=5.000000e-01\n" in out
    assert "default/group 3/episode 0/env 0/turn 0 loss_mask: ✗ diff=1.000000e+00" in out
    assert "default/group 2/episode 0/env 1/turn 0 trajectory: ✗ missing in the second dump (no such trajectory)" in out


def test_fault_16_a_loss_that_is_no_number_ends_nothing(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    change(pair[1], "loss", "pg_loss", torch.zeros(3))
    change(pair[0], "loss", "loss", torch.tensor(micro_batch(("s0", "s1"))["loss"], dtype=torch.float64))
    assert run(*pair) == 1
    out = capsys.readouterr().out
    assert "  rank0_micro0 pg_loss: ✗ unusable (the second dump holds no single number)\n" in out
    assert "  rank0_micro0 loss: ✓ diff=0.000000e+00\n" in out


def test_fault_17_help_speaks_of_the_variables_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "EASY_DUMP_DIR" not in out
    assert "WEAVER_DEBUG_DUMP_DIR" in out
    for name in ("self_hosted_dir", "remote_api_dir", "weaver_dir", "step", "num_ranks", "num_micros", "output"):
        assert f"--{name}" in out


def test_the_report_has_the_documented_layout(pair: tuple[Path, Path]) -> None:
    change(pair[1], "loss", "loss", micro_batch(("s0", "s1"))["loss"] + 3.5e-4)
    lines = render_report(compare_dumps(pair[0], None, pair[1], 0)).splitlines()
    assert lines[:9] == [
        "=" * 80,
        "Debug Dump Comparison Report - Step 0",
        "=" * 80,
        "",
        "Directories:",
        f"  Self-Hosted: {pair[0]}",
        f"  Weaver:      {pair[1]}",
        "",
        "Comparing: 1 ranks × 2 microbatches",
    ]
    start = lines.index("--- LOSS_DATA_ALL ---")
    assert lines[start : start + 16] == [
        "--- LOSS_DATA_ALL ---",
        "Total comparisons: 2",
        "Values: 1 different, 5 identical",
        "",
        "Loss differences across ranks/micros:",
        "  rank0_micro0 loss: ✗ diff=3.500000e-04",
        "  rank0_micro0 pg_loss: ✓ diff=0.000000e+00",
        "  rank0_micro0 entropy_loss: ✓ diff=0.000000e+00",
        "  rank0_micro1 loss: ✓ diff=0.000000e+00",
        "  rank0_micro1 pg_loss: ✓ diff=0.000000e+00",
        "  rank0_micro1 entropy_loss: ✓ diff=0.000000e+00",
        "",
        "Diff statistics:",
        "  max: 3.500000e-04",
        "  min: 0.000000e+00",
        "  mean: 5.833333e-05",
    ]


def test_the_tolerance_can_be_set_and_is_symmetric(pair: tuple[Path, Path]) -> None:
    change(pair[1], "loss", "loss", micro_batch(("s0", "s1"))["loss"] + 3.5e-4)
    assert run(*pair, "--atol", "1e-3") == 0
    assert run(*pair, "--atol", "0", "--rtol", "1e-2") == 0
    relative = Tolerance(atol=0.0, rtol=0.1)
    assert compare_numbers(1.0, 1.11, relative).status == compare_numbers(1.11, 1.0, relative).status == "close"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_ranks", "0", "--atol", "-1"], "--num_ranks is 0; expected at least 1; --atol is -1.0; expected at"),
        (["--steps", "x"], "--steps 'x': steps 'x' cannot be read"),
        (["--step", "0", "--steps", "1"], "--step and --steps: give one of them"),
        (["--wrong"], "No such option: --wrong"),
    ],
)
def test_bad_arguments_exit_with_5(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--self_hosted_dir", str(tmp_path), *arguments]) == 5
    assert capsys.readouterr().err.startswith(f"ConfigError: {message}")


def test_a_token_in_two_files_is_a_finding(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    put(pair[1], "forward_data", micro_batch(("s2",)), rank=1)
    assert run(*pair) == 1
    assert "  second tokens: ✗ unusable (1 tokens are in several files of the second dump, as s2, token 1)" in (
        capsys.readouterr().out
    )


def test_datums_are_described_and_compared_with_the_trajectories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_batch(1, 2)
    advantages = torch.arange(len(batch.rollout_logprobs), dtype=torch.float64)
    write_trajectories(tmp_path / "self", batch, token_values={"advantages": advantages})
    datums = build_datums(batch, advantages)
    remote = tmp_path / "remote"
    put(remote, "datums", {"step": 0, "datums": datums}, rank=None, micro=None)
    write_trajectories(remote, batch, "prepared_trajectories", token_values={"advantages": advantages})
    arguments = ["--self_hosted_dir", str(tmp_path / "self"), "--remote_api_dir", str(remote), "--step", "0"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert (
        "--- DATUMS_ANALYSIS ---\n  datums: 2\n  keys of the first: group_id, loss_fn_inputs, model_input, run_id, "
        "sample_id\n  keys of its loss_fn_inputs: advantages, logprobs, mask, target_tokens\n  input tokens: 5\n" in out
    )
    datums[1]["loss_fn_inputs"]["advantages"][2] += 1.0
    put(remote, "datums", {"step": 0, "datums": datums}, rank=None, micro=None)
    assert main(arguments) == 1
    assert "default/group 0/episode 0/env 1/turn 0 advantages: ✗ diff=1.000000e+00" in capsys.readouterr().out


def test_another_systems_losses_take_what_they_lack_from_their_forward_data(tmp_path: Path) -> None:
    """NexRL's loss files hold three numbers; its log-probabilities are beside them, and the rest is missing."""
    first, second = tmp_path / "self", tmp_path / "weaver"
    whole = micro_batch(("s0",), identities=False)
    put(first, "forward_data", {name: whole[name] for name in ("log_probs", "entropy", "response_mask")})
    put(first, "loss", {name: whole[name] for name in ("loss", "pg_loss", "entropy_loss")})
    for kind in ("forward_data", "loss", "is_loss_debug"):
        put(second, kind, whole)  # type: ignore[arg-type]
    report = compare_dumps(first, None, second, 0)
    found = {
        item.name: item.difference.status for section, item in report.items() if section.name == "IS_LOSS_DEBUG_ALL"
    }
    assert found == {
        "effective_valid": "identical",
        "log_probs": "identical",
        "old_log_probs": "missing_first",
        "advantages": "missing_first",
        "prob_ratio": "missing_first",
        "elementwise_loss": "missing_first",
        "loss": "identical",
    }
    assert report.exit_code == 3


def test_another_shape_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [write(tmp_path / name, identities=False, width=width) for name, width in (("a", 4), ("b", 5))]
    assert run(*pair) == 1
    assert "  rank0_micro0 log_probs: ✗ of two shapes (shape [2, 4] against [2, 5])\n" in capsys.readouterr().out


def test_the_json_is_bounded_and_keeps_what_does_not_hold() -> None:
    tolerance = Tolerance()
    items = [
        Item(place=f"rank{rank}", name="loss", difference=compare_numbers(0.0, float(rank == 1999), tolerance))
        for rank in range(2000)
    ]
    report = StepReport(
        step=0,
        dumps=Dumps(self_hosted=Path("a")),
        tolerance=tolerance,
        num_ranks=2000,
        num_micros=1,
        sections=(Section(name="LOSS_DATA_ALL", title="Loss", items=tuple(items)),),
    )
    (section,) = report_as_json(report)["sections"]  # type: ignore[misc]
    assert len(section["comparisons"]) == MAX_JSON_ITEMS  # type: ignore[index,call-overload,arg-type]
    assert section["num_left_out"] == 2000 - MAX_JSON_ITEMS  # type: ignore[index,call-overload]
    assert section["comparisons"][-1]["place"] == "rank1999"  # type: ignore[index,call-overload]
    assert "  ... and 1980 more, which differ less or not at all\n" in render_report(report)


def test_a_report_that_cannot_be_written_exits_with_5(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*pair, "--output", str(tmp_path)) == 5
    assert f"{tmp_path} cannot be written: " in capsys.readouterr().err


def test_lists_are_compared_in_the_precision_that_they_have(tmp_path: Path) -> None:
    """They were read as float32, and reported as identical to the bit where they were not."""
    batch = make_batch(2, 2)
    content = write_trajectories(tmp_path / "self", batch)
    content["trajectories"][0]["extra_fields"]["logprobs"][-1] += 1e-12
    put(tmp_path / "other", "trajectory", content, rank=None, micro=None)
    assert run(tmp_path / "self", tmp_path / "other", "--atol", "0") == 1
    assert run(tmp_path / "self", tmp_path / "other") == 0


def test_nan_in_a_list_is_a_number_in_both_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In jsonl it is a text, and the whole list counted as missing."""
    content = trajectory_content(make_batch(2, 2), step=0)
    content["trajectories"][0]["extra_fields"]["logprobs"][-1] = math.nan
    for folder, dump_format in (("self", "pt"), ("other", "jsonl")):
        save_content(tmp_path / folder, "trajectory", FileKey(step=0), content, dump_format=dump_format)  # type: ignore[arg-type]
    assert run(tmp_path / "self", tmp_path / "other") == 0
    assert "Verdict: identical" in capsys.readouterr().out


def test_a_list_has_no_dtype_of_its_own(tmp_path: Path) -> None:
    """A file of another system's, as jsonl with plain lists, against one with tensors."""
    content = micro_batch(("s0", "s1"), identities=False)
    listed = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in content.items()}
    put(tmp_path / "self", "forward_data", content)
    save_content(
        tmp_path / "other", "forward_data", FileKey(step=0, global_rank=0, micro=0), listed, dump_format="jsonl"
    )
    assert run(tmp_path / "self", tmp_path / "other") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_one_files_dtype_is_reported_whatever_the_others_have(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    """All files of a side were joined first: bfloat16 became float32 without a word, and float8 a traceback."""
    change(pair[1], "forward_data", "log_probs", micro_batch(("s0", "s1"))["log_probs"].to(dtype))
    assert run(*pair, "--atol", "1") == 1
    out = capsys.readouterr().out
    assert "rank0_micro0 log_probs: ✗" in out
    assert f"of two dtypes (float32 against {str(dtype).removeprefix('torch.')})" in out
    assert "rank0_micro1 log_probs: ✓ diff=0.000000e+00" in out


def test_whole_numbers_beside_a_file_of_floats_stay_whole(pair: tuple[Path, Path]) -> None:
    """Joined with a float32 file, two ids above 2**24 became equal."""
    for folder, number in zip(pair, (2**24, 2**24 + 1), strict=True):
        ids = torch.full((2, 4), number)
        change(folder, "forward_data", "log_probs", ids)
    assert run(*pair) == 1


def test_a_file_without_a_value_is_missing_alone(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """One file's lack was reported of all files, and none of the others was compared."""
    change(pair[1], "forward_data", "log_probs", None)
    assert run(*pair) == 3
    out = capsys.readouterr().out
    assert "25 of 26 comparisons hold, 1 are missing" in out


def test_a_mask_of_old_log_probs_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an empty mask nothing was compared, and everything equal."""
    content = micro_batch(("s0", "s1"))
    put(tmp_path / "self", "old_log_probs", content, rank=None, micro=None)
    content["response_mask"] = torch.zeros_like(content["response_mask"])
    put(tmp_path / "other", "old_log_probs", content, rank=None, micro=None)
    assert run(tmp_path / "self", tmp_path / "other") == 1
    assert "First: OLD_LOG_PROBS, batch response_mask: ✗ diff=1.000000e+00" in capsys.readouterr().out


def test_samples_that_a_file_does_not_name_are_an_error(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback."""
    change(pair[1], "loss", "sample_ids", ["s0"])
    assert run(*pair) == 5
    assert capsys.readouterr().err.endswith("sample_index has 1, and sample_ids has 1 entries\n")


def test_complex_numbers_are_not_compared_as_real_ones(pair: tuple[Path, Path]) -> None:
    """Imaginary parts were dropped with a warning."""
    change(pair[1], "forward_data", "log_probs", micro_batch(("s0", "s1"))["log_probs"] + 1j)
    assert run(*pair) == 3
