"""Every YAML example of the documentation loads as it stands there, on top of a shipped configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mock_scheduler.config.rollout_mock import RetentionConfig, RolloutMockConfig
from pipelines.config.loading import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("configuration.md", "dialects.md")


def examples() -> list[tuple[str, str]]:
    """Each block's place (document and number) and text."""
    found = []
    for name in DOCUMENTS:
        blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{name} {number}", block) for number, block in enumerate(blocks, start=1)]
    return found


EXAMPLES = examples()


def test_there_are_examples() -> None:
    assert {place.split()[0] for place, _ in EXAMPLES} == set(DOCUMENTS)


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES], ids=[place for place, _ in EXAMPLES])
def test_a_documented_example_loads_and_is_on(tmp_path: Path, text: str) -> None:
    for name in ("base", "quickstart"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    (tmp_path / "example.yaml").write_text(f"defaults:\n  - quickstart\n  - _self_\n\n{text}", encoding="utf-8")
    mock = load_config("example", config_path=tmp_path).rollout_mock
    assert mock.modes_in_use & {"dump", "mock", "cache"}


def test_every_key_of_the_section_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = {*RolloutMockConfig.model_fields} - {"retention"} | {
        f"retention.{key}" for key in RetentionConfig.model_fields
    }
    assert {key for key in keys if f"| `{key}` |" not in text} == set()
