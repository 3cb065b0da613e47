"""Every YAML example of the documentation loads as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("configuration.md", "dialects.md")
OTHERS = ("determinism.md", "layouts.md", "nexrl.md", "rollout_correction.md")


def examples(documents: tuple[str, ...] = DOCUMENTS) -> list[tuple[str, str]]:
    """Each block's place (document and number) and text."""
    found = []
    for name in documents:
        blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{name} {number}", block) for number, block in enumerate(blocks, start=1)]
    return found


EXAMPLES = examples()


def test_there_are_examples() -> None:
    assert {place.split()[0] for place, _ in EXAMPLES} == set(DOCUMENTS)


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES], ids=[place for place, _ in EXAMPLES])
def test_a_documented_example_loads_and_is_on(tmp_path: Path, text: str) -> None:
    mock = load_example(tmp_path, text).rollout_mock
    assert mock.modes_in_use & {"dump", "mock", "cache"}


@pytest.mark.parametrize("text", [text for _, text in examples(OTHERS)], ids=[place for place, _ in examples(OTHERS)])
def test_an_example_of_another_page_sets_its_keys(tmp_path: Path, text: str) -> None:
    config = load_example(tmp_path, text)
    assert config.model_fields_set >= yaml.safe_load(text).keys() - {"actor_rollout_ref"}  # a section of verl's


def load_example(tmp_path: Path, text: str) -> PipelineConfig:
    """Load a block on top of the quickstart."""
    for name in ("base", "quickstart"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    (tmp_path / "example.yaml").write_text(f"defaults:\n  - quickstart\n  - _self_\n\n{text}", encoding="utf-8")
    return load_config("example", config_path=tmp_path)
