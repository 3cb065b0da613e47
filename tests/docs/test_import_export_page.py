"""The page of foreign files and that of slime: their code runs, and their tables say what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mock_scheduler.adapters.formats import FORMATS
from mock_scheduler.adapters.imports.steps import ImportOptions
from mock_scheduler.adapters.slime.settings import SlimeSettings
from tests.docs.test_pages import DOCS

PAGE = (DOCS / "import_export.md").read_text(encoding="utf-8")
SLIME = (DOCS / "frameworks/slime.md").read_text(encoding="utf-8")


def test_the_code_runs_and_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "import_export.md", "exec"), {"__name__": "import_export"})
    printed = capsys.readouterr().out
    said = re.search(r"It prints `(.*?)` and\s+`(.*?)`\.", PAGE, re.DOTALL)
    assert said is not None
    assert said[1] in printed
    assert said[2] in printed


def test_the_table_has_every_format() -> None:
    rows = [
        f"| `{one.name}` | {one.framework} | {one.source} | {f'{one.lacks} ' if one.lacks else ''}|" for one in FORMATS
    ]
    assert [row for row in rows if row not in PAGE] == []
    assert len(re.findall(r"^\| `[\w-]+` \| ", PAGE, re.MULTILINE)) == len(FORMATS)


def test_the_page_names_every_field_that_may_lack() -> None:
    assert ImportOptions().assumed == tuple(
        f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "logprobs_mode")
    )
    for option in ("--temperature", "--top-p", "--top-k", "--logprobs-mode", "--group-size", "--reward-key", "--shift"):
        assert f"`{option}" in PAGE


def test_the_settings_of_slimes_page_are_settings() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", SLIME, re.DOTALL)
    settings = SlimeSettings.model_validate(yaml.safe_load(block))
    assert (settings.mock_config().mode, settings.package) == ("dump", "slime")
    assert {name for name in SlimeSettings.model_fields if f"| `{name}` | " not in SLIME} == set()
