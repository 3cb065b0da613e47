"""``show``: one recorded trajectory from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler import cli
from tests.recording.builders import make_batch
from tests.report.recordings import make_played, record


def test_show_reads_texts_from_the_recording_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "v1", {0: make_played(0, 1)}, mode="val")
    assert cli.main(["show", str(folder), "--mode", "val", "--row", "default/group 0/episode 0/env 1"]) == 0
    assert capsys.readouterr().out == (
        f"{folder}: val step 0, row 1 of 2\n"
        "default/group 0/episode 0/env 1/turn 0  FrozenLake\n"
        "terminated, reward 1.0, 1 turn, 5 tokens, 3 of them sampled\n"
        "\n"
        "prompt  2 tokens\n"
        "  <pad> <bos>\n"
        "  0 1\n"
        "\n"
        "turn 0  3 tokens, logprob -1.5000 (mean -0.5000), reward 1.0, policy version 0\n"
        "  wall Left Right\n"
        "  2 3 4\n"
    )
    assert cli.main(["show", str(folder), "--mode", "val", "--row", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["identity"], found["reward"]) == ("default/group 0/episode 0/env 1/turn 0", 1.0)
    assert found["stretches"] == [
        {"is_response": False, "tokens": [0, 1], "logprobs": None, "text": "<pad> <bos>"},
        {"is_response": True, "tokens": [2, 3, 4], "logprobs": [-0.5, -0.5, -0.5], "text": "wall Left Right"},
    ]
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text('{"0": "zero", "2": "two"}', encoding="utf-8")
    arguments = ["show", str(folder), "--mode", "val", "--row", "1", "--vocabulary", str(vocabulary)]
    assert cli.main(arguments) == 0
    assert "  zero <1>\n  0 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "2"], "holds no train step 2; steps present: train 0-1; val.judge 4"),
        (["--mode", "val"], "holds no val step 0; steps present: train 0-1; val.judge 4"),
        (["--mode", "val", "--scheduler", "judge"], "holds no val.judge step 0; steps present: train 0-1; val.judge 4"),
    ],
)
def test_show_of_a_step_that_is_not_there_names_those_that_are(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path, {0: make_batch(), 1: make_batch()})
    record(folder, {4: make_batch()}, mode="val", scheduler_id="judge")
    assert cli.main(["show", str(folder), *arguments]) == 5
    assert capsys.readouterr().err == f"error: {folder} {message}\n"


def test_show_of_a_row_that_is_not_there_names_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path, {0: make_batch()})
    assert cli.main(["show", str(folder), "--row", "4"]) == 5
    assert capsys.readouterr().err == (
        f"error: row '4' is not in {folder}: train step 0; it holds rows 0 to 3, default/group 0/episode 0/env 0/turn "
        "0 to default/group 1/episode 0/env 1/turn 0\n"
    )
