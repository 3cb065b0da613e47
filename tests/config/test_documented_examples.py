"""Every YAML example of the documentation loads as it stands there, and every documented default is the schema's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.rollout_mock import RetentionConfig, RolloutMockConfig
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("configuration.md", "dialects.md")
OTHERS = ("determinism.md", "layouts.md", "nexrl.md", "rollout_correction.md")

TABLES = {
    "| key | default | meaning |": RolloutMockConfig,
    "| key of `training` | default | meaning |": TrainingConfig,
    "| key of `algorithm.rollout_correction` | default | meaning |": RolloutCorrectionConfig,
    "| key of `align` | default | meaning |": AlignConfig,
}
NOTHING = ("all", "none", "null", "by the trainer")


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


@pytest.mark.parametrize("heading", TABLES)
def test_every_documented_default_is_the_schemas(heading: str) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in page.split(heading)[1].split("\n\n")[0].splitlines()[2:]]
    stated = {key: cells[1].strip() for cells in rows for key in re.findall(r"`([^`]+)`", cells[0])}
    for key in ("origin", "output_dir", "executor"):  # their defaults follow from other keys, or are a section
        stated.pop(key, None)
    assert stated == {key: text for key, text in stated.items() if is_default(TABLES[heading], key, text)}
    assert len(stated) > 8


def test_another_default_is_found() -> None:
    assert is_default(AlignConfig, "proofs.num_perturbations", "`5`")
    assert not is_default(AlignConfig, "proofs.num_perturbations", "`6`")


def load_example(tmp_path: Path, text: str) -> PipelineConfig:
    """Load a block on top of the quickstart."""
    for name in ("base", "quickstart"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    (tmp_path / "example.yaml").write_text(f"defaults:\n  - quickstart\n  - _self_\n\n{text}", encoding="utf-8")
    return load_config("example", config_path=tmp_path)


def is_default(schema: type[BaseModel], key: str, text: str) -> bool:
    """Whether the text of a table's cell is the default of a dotted key."""
    section, _, name = key.rpartition(".")
    holder = schema.model_fields[section].get_default(call_default_factory=True) if section else None
    fields = type(holder).model_fields if holder is not None else schema.model_fields
    default = fields[name].get_default(call_default_factory=True)
    expected = None if text.strip("`") in NOTHING and default is None else yaml.safe_load(text.strip("`"))
    return bool(default == expected)


def test_every_key_of_the_section_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = {*RolloutMockConfig.model_fields} - {"retention"} | {
        f"retention.{key}" for key in RetentionConfig.model_fields
    }
    assert {key for key in keys if f"| `{key}` |" not in text} == set()
