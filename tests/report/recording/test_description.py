"""``inspect``: a recording described as a whole output, with oddities and unreadable steps; and bars of histograms."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import show_progress
from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.recording.manifest import Manifest, save_manifest
from mock_scheduler.recording.retention import RetentionRecord, save_retention
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.report.recording.description import draw_bars
from tests.recording.builders import SAMPLING, make_batch, make_contract, make_row
from tests.report.recordings import flip_last_byte, inspect, make_odd_batch, make_played, record, size_of


def test_inspect_says_what_a_recording_is_and_holds(tmp_path: Path) -> None:
    steps = {3: make_played(0, 1, 0, 1), 4: make_played(1, 1, 1, 0), 7: make_played(1, 1, 1, 1)}
    folder = record(tmp_path, steps, policy_version=2)
    removed = {"train": StepRanges.parse("0-2")}
    save_retention(open_storage(str(folder)), RetentionRecord(start_points=(0, 3), removed=removed))
    files = [folder / "train" / f"step_{step:06d}.safetensors" for step in steps]
    size, total = size_of(files[0]), size_of(*files)
    code, text = inspect(folder)
    assert code == 0
    assert text == (
        f"recording {folder}\n"
        "run id       run-1\n"
        "made with    code my_project 0123456789ab (modified), mock-scheduler\n"
        "             fedcba987654, python 3.11.9, megatron-core 0.16.1, torch 2.13.0,\n"
        "             Linux-x86_64\n"
        "also holds   vocabulary\n"
        "contract     sequence_length = 64 (must match)\n"
        "             vocab_size = 16 (must match)\n"
        '             layout = "tp1" (may differ)\n'
        "checkpoints  before step 3\n"
        "\n"
        "train  steps 3-4, 7\n"
        "  gaps       5-6 (not recorded)\n"
        "  removed    0-2 (by retention)\n"
        "  stored as  3 files\n"
        f"  size       {total}, {size} per step\n"
        "  rows       12: 12 trajectories in 6 groups of 2\n"
        "  tokens     66, of which 42 sampled\n"
        "  ended      terminated 12, truncated 0, aborted 0\n"
        "  policy     version 0, staleness 2\n"
        "  tags       FrozenLake 12\n"
        "\n"
        "                   reward               response\n"
        "  step rows tokens   mean   std min max   median p90 policy stale    size\n"
        f"     3    4     22    0.5   0.5   0   1        3   5      0     2 {size}\n"
        f"     4    4     22   0.75 0.433   0   1        3   5      0     2 {size}\n"
        f"     7    4     22      1     0   1   1        3   5      0     2 {size}\n"
        "\n"
        "  reward  mean 0.75, std 0.433, min 0, median 1, p90 1, max 1\n"
        "    0  3 ███████████████████████▋\n"
        "    1  9 ███████████████████████████████████████████████████████████████████████\n"
        "\n"
        "  response length  mean 3.5, std 1.118, min 2, median 3, p90 5, max 5\n"
        "    2  3 ███████████████████████████████████████████████████████████████████████\n"
        "    3  3 ███████████████████████████████████████████████████████████████████████\n"
        "    4  3 ███████████████████████████████████████████████████████████████████████\n"
        "    5  3 ███████████████████████████████████████████████████████████████████████\n"
    )


def test_inspect_names_what_is_odd_in_a_recording(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_odd_batch()}, mode="val")
    size = size_of(folder / "val" / "step_000000.safetensors")
    code, text = inspect(folder)
    assert code == 0
    assert text[text.index("\n\n") :] == (
        "\n\nval  step 0\n"
        "  stored as       1 file\n"
        f"  size            {size}, {size} per step\n"
        "  rows            3: 3 trajectories in 2 groups\n"
        "  tokens          10, of which 4 sampled\n"
        "  ended           terminated 2, truncated 0, aborted 1\n"
        "  policy          version 0, staleness 0\n"
        "  tags            FrozenLake 2, Sokoban 1\n"
        "  extras          info: JSON\n"
        "                  router: ragged uint8 [n, 4]\n"
        "                  weight: float32 []\n"
        "  duplicates      1, for example in step 0: default/group 0/episode 0/env 1/turn\n"
        "                  0 repeats default/group 0/episode 0/env 0/turn 0\n"
        "  partial groups  1, for example in step 0: default/group 1/episode 0: 1 of 2\n"
        "                  trajectories\n"
        "  no response     1 row\n"
        "\n"
        "                   reward                response\n"
        "  step rows tokens   mean   std  min max   median p90 policy stale    size\n"
        f"     0    3     10    0.5 0.707 -0.5   1        2   2      0     0 {size}\n"
        "\n"
        "  reward  mean 0.5, std 0.7071, min -0.5, median 1, p90 1, max 1\n"
        "    -0.5  1 ██████████████████████████████████\n"
        "       1  2 ████████████████████████████████████████████████████████████████████\n"
        "\n"
        "  response length  mean 1.333, std 0.9428, min 0, median 2, p90 2, max 2\n"
        "    0  1 ███████████████████████████████████▌\n"
        "    2  2 ███████████████████████████████████████████████████████████████████████\n"
    )


def test_inspect_shows_the_first_fields_of_a_long_contract(tmp_path: Path) -> None:
    """Ten fields that must match are shown before one that may differ, and the rest is counted."""
    contract = make_contract(**{f"field_{number}": number for number in range(10)})
    lines = inspect(record(tmp_path, {}, contract=contract))[1].splitlines()
    assert lines[6:18] == [
        "contract    sequence_length = 64 (must match)",
        "            vocab_size = 16 (must match)",
        *(f"            field_{number} = {number} (must match)" for number in range(8)),
        "            and 2 that must match, 1 that may differ (all with --json)",
        "",
    ]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_inspect_never_writes_beyond_the_terminal(width: int, tmp_path: Path) -> None:
    folder = record(tmp_path / "v1", {step: make_played(0, 1, 0.25, 1) for step in range(3)})
    record(folder, {0: make_odd_batch()}, mode="val")
    lines = inspect(folder, width=width)[1].splitlines()
    assert max(len(line) for line in lines if not line.startswith("recording ")) <= width
    assert not [line for line in lines if line != line.rstrip()]


def test_inspect_shows_the_first_and_last_steps_of_many(tmp_path: Path) -> None:
    folder = record(tmp_path, {step: make_played(0, 1, 0, 1) for step in range(23)})
    lines = inspect(folder)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  step "))
    assert [int(line.split()[0]) for line in lines[first + 1 : first + 21]] == [*range(10), *range(13, 23)]
    assert lines[first + 21] == "  and 3 steps between (all with --json, some with --steps)"


def test_inspect_of_some_steps_counts_only_those(tmp_path: Path) -> None:
    folder = record(tmp_path, {step: make_played(0, 1, 0, 1) for step in range(4)})
    text = inspect(folder, steps="1,3-")[1]
    assert "train  steps 1, 3 of 0-3\n  stored as  2 files\n" in text
    assert "  rows       8: 8 trajectories in 4 groups of 2\n" in text


def test_inspect_of_some_steps_leaves_out_folders_without_them(tmp_path: Path) -> None:
    folder = record(tmp_path, {step: make_played(0, 1, 0, 1) for step in range(3)})
    record(folder, {0: make_played(0, 1, 0, 1)}, mode="val")
    text = inspect(folder, steps="2")[1]
    assert "\ntrain  step 2 of 0-2\n" in text
    assert "\nval" not in text


def test_inspect_of_steps_that_are_not_there_is_an_error_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It described a recording without steps, with exit code 0."""
    folder = record(tmp_path, {step: make_played(0, 1, 0, 1) for step in range(3)})
    assert cli.main(["inspect", str(folder), "--steps", "99"]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: none of the steps 99 is recorded in {folder}; steps present: train 0-2\n"


def test_inspect_draws_no_histogram_of_one_value(tmp_path: Path) -> None:
    text = inspect(record(tmp_path, {0: make_played(0.5, 0.5)}))[1]
    assert "\n\n  reward  0.5 in all 2 rows\n\n  response length  mean 2.5" in text


def test_inspect_names_no_tags_where_there_are_none_and_cuts_many(tmp_path: Path) -> None:
    silent = RolloutBatch.from_trajectories([make_row(0, 0, tag="")], sampling=SAMPLING, group_size=None)
    assert "  tags" not in inspect(record(tmp_path / "v1", {0: silent}))[1]
    rows = [make_row(0, number, tag=f"t{number:02d}") for number in range(14)]
    many = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
    text = inspect(record(tmp_path / "v2", {0: many}), width=200)[1]
    listed = ", ".join(f"t{number:02d} 1" for number in range(12))
    assert re.search(rf"\n  tags +{listed}, and 2 more\n", text)


def test_inspect_reads_recordings_of_which_no_repository_or_only_the_librarys_is_known(tmp_path: Path) -> None:
    def made_with(git: object, library_git: object) -> str:
        provenance = {"git": git, "library_git": library_git, "python": "3.11"}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        manifest = Manifest(run_id="r", contract=make_contract(), provenance=provenance)
        save_manifest(open_storage(str(folder)), manifest)
        return inspect(folder)[1].splitlines()[2]

    old = {"revision": "0123456789abcdef", "is_modified": False}
    assert made_with(old, None) == "made with  code 0123456789ab, python 3.11"
    assert made_with(None, None) == "made with  python 3.11"
    assert made_with(None, {**old, "root": "x"}) == "made with  mock-scheduler 0123456789ab, python 3.11"


def test_inspect_lists_steps_that_cannot_be_read_beside_the_others(tmp_path: Path) -> None:
    folder = record(tmp_path, {step: make_played(0, 1, 0, 1) for step in range(2)})
    flip_last_byte(folder / "train" / "step_000000.safetensors")
    code, text = inspect(folder)
    assert code == 5
    assert "  rows       4: 4 trajectories in 2 groups of 2\n" in text
    assert text.split("\n\n")[-1] == (
        f"cannot be read\n  {folder}/train/step_000000.safetensors: tensor 'terminations' does not match its digest: "
        "the file was changed after it was written. Restore it from a copy or record the step again.\n"
    )


def test_inspect_of_a_recording_without_steps_says_so(tmp_path: Path) -> None:
    assert inspect(record(tmp_path, {}))[1].endswith("\n\nno step is recorded\n")


def test_inspect_writes_everything_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "v1", {3: make_played(0, 1, 0, 1), 4: make_odd_batch()})
    assert cli.main(["inspect", str(folder), "--steps", "4", "--json", "-"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["format_version"], value["run_id"], value["problems"]) == (1, "run-1", [])
    assert value["contract"][0] == {
        "name": "sequence_length",
        "rule": "must_match",
        "match": "equal",
        "value": 64,
    }
    (train,) = value["folders"]
    assert (train["present"], train["chosen"], train["gaps"], train["forms"]) == ("3-4", "4", "", {"file": 1})
    assert [step["step"] for step in train["steps"]] == [4]
    assert train["steps"][0]["extras"] == {"info": "JSON", "router": "ragged uint8 [n, 4]", "weight": "float32 []"}
    assert train["totals"]["reward"] == train["steps"][0]["reward"]
    assert train["totals"]["reward_bars"] == [
        {"low": -0.5, "high": -0.5, "count": 1},
        {"low": 1.0, "high": 1.0, "count": 2},
    ]
    path = tmp_path / "out" / "a.json"
    assert cli.main(["inspect", str(folder), "--steps", "4", "--json", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert capsys.readouterr().out.startswith(f"recording {folder}\n")


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["diff", "x"], ["show"]])
def test_what_is_no_recording_is_named(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command[:1], str(tmp_path / "none"), *command[1:]]) == 5
    assert capsys.readouterr().err.startswith(
        f"error: [Rollout Mock] Recording not found: {tmp_path}/none/recording.json\n"
    )


def test_steps_that_cannot_be_read_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path, {0: make_batch()})
    assert cli.main(["inspect", str(folder), "--steps", "5-3"]) == 5
    assert capsys.readouterr().err == "error: --steps: range '5-3' ends before it begins\n"


def test_progress_is_drawn_on_a_terminal_only_and_is_gone_at_the_end() -> None:
    text = io.StringIO()
    with show_progress("verifying steps", console=Console(file=text), delay_s=0) as update:
        update(1, 2)
    assert text.getvalue() == ""
    terminal = Console(file=text, force_terminal=True, width=80)
    with show_progress("verifying steps", console=terminal, delay_s=3600) as update:
        update(1, 2)
    assert text.getvalue() == ""
    with show_progress("verifying steps", console=terminal, delay_s=0) as update:
        update(1, 2)
    assert "verifying steps" in text.getvalue()
    assert "1/2" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")


BARS = (Bar(low=-1.0, high=-1.0, count=1), Bar(low=0.5, high=0.5, count=1600), Bar(low=2.0, high=2.0, count=400))


def test_bars_fill_the_width_in_eighths_and_any_count_shows() -> None:
    """20 columns: 3 for the label, 2 + 5 for the count, 1 + 9 for the bar: of 72 eighths, 400 of 1,600 fill 18."""
    assert list(draw_bars(BARS, width=20)) == [
        " -1      1 ▏",
        "0.5  1,600 █████████",
        "  2    400 ██▎",
    ]


def test_without_unicode_bars_are_hashes() -> None:
    assert list(draw_bars(BARS, width=20, ascii_only=True)) == [
        " -1      1 #",
        "0.5  1,600 #########",
        "  2    400 ##",
    ]


def test_bins_are_labelled_by_their_edges() -> None:
    bins = (Bar(low=0, high=5, count=2), Bar(low=5, high=10, count=0))
    assert list(draw_bars(bins, width=18)) == [" 0 to 5  2 ███████", "5 to 10  0"]


def test_a_narrow_terminal_still_gets_bars() -> None:
    assert list(draw_bars(BARS[1:2], width=1)) == ["0.5  1,600 ████"]


def test_nothing_draws_nothing() -> None:
    assert list(draw_bars((), width=80)) == []
