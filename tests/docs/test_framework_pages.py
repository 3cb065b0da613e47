"""The pages of frameworks with settings: their code prints what they say, and their settings are settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mock_scheduler.adapters.areal.settings import ArealSettings
from mock_scheduler.adapters.frameworks import find_frameworks
from mock_scheduler.adapters.nemo_rl.settings import NemoRlSettings
from mock_scheduler.adapters.roll.settings import RollSettings
from mock_scheduler.adapters.settings import RolloutSettings
from mock_scheduler.adapters.skyrl.settings import SkyrlSettings
from mock_scheduler.adapters.verl.settings import VerlSettings
from tests.docs.test_pages import DOCS

PAGES: dict[str, type[RolloutSettings]] = {
    "skyrl": SkyrlSettings,
    "areal": ArealSettings,
    "roll": RollSettings,
    "nemo_rl": NemoRlSettings,
}
SETTINGS: dict[str, type[RolloutSettings]] = {**PAGES, "verl": VerlSettings}


def read_page(name: str) -> str:
    return (DOCS / f"frameworks/{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_the_code_runs_and_prints_what_the_page_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Lines to add to a training of the framework print nothing.
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", read_page(name), re.DOTALL) if "print(" in code]
    exec(compile(block, f"{name}.md", "exec"), {"__name__": name})
    said = re.search(r"It prints `(.*?)`\.", read_page(name))
    assert said is not None
    assert capsys.readouterr().out.strip() == said[1]


@pytest.mark.parametrize(("name", "settings"), SETTINGS.items())
def test_the_settings_of_the_page_are_settings(name: str, settings: type[RolloutSettings]) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", read_page(name), re.DOTALL)
    assert settings.model_validate(yaml.safe_load(block)).mock_config().mode == "dump"
    assert {key for key in settings.model_fields if f"| `{key}` | " not in read_page(name)} == set()
    assert f"`{settings.variable}`" in read_page(name)


def test_every_page_that_an_adapter_names_is_there() -> None:
    assert [one.page for one in find_frameworks() if not (DOCS.parent / one.page).is_file()] == []
