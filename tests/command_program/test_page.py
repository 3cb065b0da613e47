"""Every YAML example of the page on any program loads, and its tables name every key and field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mock_scheduler.command_program.command import build_command
from mock_scheduler.command_program.config import LAYOUT_FIELDS, PLACE_FIELDS, RANKS_FIELD, SIZE_FIELDS, CommandConfig
from mock_scheduler.command_program.program import PROGRAM, own_config

PAGE = (Path(__file__).parents[2] / "docs" / "any_program.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
#: Keys that an alignment sets, and a user does not.
_SET_BY_ALIGN = {"initial_state", "order", "perturbation", "graft"}


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_loads_and_makes_a_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "align.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "train.py").touch()
    config = own_config(PROGRAM.build_loader("align", tmp_path)(()))
    command = build_command(config, folder=tmp_path, python="/env/bin/python")
    assert re.search(r"\{[a-z]", command.shown_inner) is None


def test_the_page_names_every_key_and_every_field() -> None:
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    assert set(CommandConfig.model_fields) - _SET_BY_ALIGN <= named
    fields = set(re.findall(r"`\{([a-z_]+)\}`", PAGE))
    assert {*LAYOUT_FIELDS, *SIZE_FIELDS, *PLACE_FIELDS, RANKS_FIELD} <= fields


@pytest.mark.parametrize("path", ["README.md", "docs", "tests/integrations"])
def test_no_example_of_one_machine_opens_a_port(path: str) -> None:
    """Whoever follows the README must not have a port on which others can run code."""
    root = Path(__file__).parents[2] / path
    texts = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.yaml")]
    commands = [line for text in texts for line in re.findall(r"^command: .*", text.read_text(encoding="utf-8"), re.M)]
    assert commands
    assert [line for line in commands if "torchrun" in line and "{nodes}" not in line] == []
