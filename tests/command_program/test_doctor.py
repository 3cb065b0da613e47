"""The doctor runs one step of a command twice as it stands, and finds what does not repeat itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.commands.doctor import run_doctor
from mock_scheduler.display.console import Console
from mock_scheduler.errors import ConfigError
from tests.command_program.simulated import TP2, Runs, write_config


def doctor(folder: Path, *overrides: str, **options: Any) -> tuple[int, dict[str, Any], str, Runs]:
    path, runs, output = write_config(folder), Runs(), io.StringIO()
    code = run_doctor(
        path.stem,
        config_path=path.parent,
        overrides=overrides,
        output_dir=None,
        make_launch=runs.make_launch,
        console=Console(file=output, width=200),
        **options,
    )
    result = json.loads((folder / "out" / "doctor" / "doctor.json").read_text(encoding="utf-8"))
    return code, result, output.getvalue(), runs


def test_a_command_that_repeats_itself_is_identical_and_its_replicas_agree(tmp_path: Path) -> None:
    code, result, text, runs = doctor(tmp_path, TP2, step=1)
    assert (code, result["verdict"], runs.made) == (0, "identical", ["first", "second"])
    assert [step["step"] for step in result["steps"]] == [0, 1]
    assert result["num_operations"] > 50
    assert (result["recording_dir"], result["num_settings"], result["settings"]) == (None, 1, [])
    assert result["replicas"]["num_copies"] == {"tp": 4}
    assert "2 steps (0 to 1) in each of 2 runs: first, second" in text
    assert "settings read back: 1, equal in both runs" in text
    assert "replicas agree: every copy is equal to the last bit" in text


def test_an_operation_that_draws_unseeded_is_named(tmp_path: Path) -> None:
    code, result, text, _ = doctor(tmp_path, "options.fault=unseeded")
    assert (code, result["verdict"], result["replicas"]) == (4, "differs", None)
    origin = result["steps"][0]["origin"]
    assert origin["first"]["operator"] == "aten.rand.default"
    assert "it draws random numbers, from a generator that was not in the same state in both runs" in text


def test_replicas_that_disagree_in_runs_that_repeat_themselves_are_a_divergence(tmp_path: Path) -> None:
    code, result, text, _ = doctor(tmp_path, TP2, "options.fault=torn")
    assert (code, result["verdict"]) == (1, "identical")
    assert result["replicas"]["num_conflicts"] == 2
    assert "replicas disagree: in 2 tensors" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 2}, "--step is 2; the configuration has steps 0 to 1 (max_steps=2)"),
        ({"recording": Path("rec")}, "--recording is rec, and this program takes no rollouts: leave it out"),
    ],
)
def test_what_a_command_cannot_have_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor(tmp_path, **options)
    assert str(caught.value) == message
