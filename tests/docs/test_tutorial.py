"""The tutorial: its configuration is planned as the text says, and its commands are commands that there are."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.cli import app
from mock_scheduler.errors import ExitCode
from pipelines.config.loading import build_loader
from pipelines.program import PROGRAM

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words of every line of a shell block that runs ``mock-scheduler``, without the program."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in found if words and words[0] == ".venv/bin/mock-scheduler"]


def unknown_words(words: list[str]) -> list[str]:
    """Of a command line, the command where there is none of that name, and options that it does not have."""
    command, *rest = words
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if shown.exit_code != 0:
        return [command]
    known = {word.rstrip(",") for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*,?", shown.output)}
    return [word for word in rest if word.startswith("-") and word not in known]


def test_the_configuration_is_planned_as_the_text_says(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for path in (ROOT / "configs").glob("*.yaml"):
        shutil.copy(path, tmp_path)
    (tmp_path / "my_change.yaml").write_text(block, encoding="utf-8")
    plan = plan_alignment(
        build_loader("my_change", tmp_path), program=PROGRAM, overrides=[], output_dir=tmp_path / "out"
    )
    assert plan.baseline.config.max_steps == 2
    assert plan.baseline.config.output_dir.endswith("/baseline")
    assert [(run.name, run.config.parallel.describe(), run.must_be_exact) for run in plan.candidates] == [
        ("tp2-sp", "tp2 pp1 dp1 sp", True),
        ("my-reduction", "tp2 pp1 dp1 sp", False),
    ]
    assert [run.entry for run in plan.candidates] == ["pipelines.agentic", "tests.faults.norm_gradients_not_reduced"]


@pytest.mark.parametrize("text", [TEXT, README], ids=["tutorial", "README"])
def test_commands_and_options_are_there(text: str) -> None:
    found = commands(text)
    assert len(found) > 4
    assert {" ".join(words): unknown_words(words) for words in found if unknown_words(words)} == {}


def test_a_command_and_an_option_that_are_not_there_are_found() -> None:
    """Negative control."""
    assert unknown_words(["realign", "my_change"]) == ["realign"]
    assert unknown_words(["align", "my_change", "--cii"]) == ["--cii"]


@pytest.mark.parametrize("text", [TEXT, README], ids=["tutorial", "README"])
def test_exit_codes_are_those_of_the_program(text: str) -> None:
    pattern = r"(0 aligned, 1 diverged, 2 suspect, 3 incomparable, 4 unverified); 5 is bad input"
    stated = re.search(pattern, " ".join(text.split()))
    assert stated is not None
    names = ("ALIGNED", "DIVERGED", "SUSPECT", "INCOMPARABLE", "UNVERIFIED")
    assert stated[1] == ", ".join(f"{int(ExitCode[name])} {name.lower()}" for name in names)
    assert int(ExitCode.USAGE) == 5
