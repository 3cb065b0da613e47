"""The page of rollout correction: its examples load and run, and its tables name every key, metric and preset."""

from __future__ import annotations

import doctest
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, compute_correction, correction_metrics
from mock_scheduler.correction.config.algorithm import describe_correction
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.config.verl_keys import DIVERGENCE_OPTIONS, RATIO_OPTIONS
from mock_scheduler.correction.engine.states import LAG_EDGES, POSITION_EDGES, bucket_names
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rollout_correction.md").read_text(encoding="utf-8")
YAML_BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)

#: What is said of a specification where nothing else is configured; the tables of presets leave it out.


def section_text(heading: str) -> str:
    """What is below a heading, up to the next one."""
    return re.split(r"\n#+ ", TEXT.split(f"# {heading}\n", 1)[1], maxsplit=1)[0]


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def load(folder: Path, text: str) -> PipelineConfig:
    """The text on top of a shipped configuration."""
    for name in ("base", "quickstart"):
        (folder / f"{name}.yaml").write_text((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    (folder / "example.yaml").write_text(f"defaults:\n  - quickstart\n  - _self_\n\n{text}", encoding="utf-8")
    return load_config("example", config_path=folder)


# Examples


@pytest.mark.parametrize("number", range(len(YAML_BLOCKS)))
def test_an_example_loads_and_is_on(tmp_path: Path, number: int) -> None:
    assert load(tmp_path, YAML_BLOCKS[number]).algorithm.rollout_correction is not None


def test_the_log_says_of_the_example_with_rules_what_the_page_says(tmp_path: Path) -> None:
    (block,) = (block for block in YAML_BLOCKS if "rules:" in block)
    line = describe_correction(load(tmp_path, block).algorithm)[0]
    assert line == f"[Rollout Correction] algorithm.rollout_correction: {_text_block()}"


def _text_block() -> str:
    (block,) = re.findall(r"```text\n(.*?)\n```", TEXT, re.DOTALL)
    return str(block)


def test_the_release_keeps_the_ratios_that_the_page_says(tmp_path: Path) -> None:
    (block,) = (block for block in YAML_BLOCKS if "verl_compat" in block)
    assert "keeps ratios in [0.714286, 1.66667]" in describe_correction(load(tmp_path, block).algorithm)[1]
    assert "that release keeps ratios in [0.714, 1.67]" in block


def test_the_worked_example_prints_what_the_page_says() -> None:
    names: dict[str, object] = {}
    runner, failures = doctest.DocTestRunner(verbose=False), []
    assert len(PYTHON_BLOCKS) == 4
    for number, block in enumerate(PYTHON_BLOCKS, start=1):
        test = doctest.DocTestParser().get_doctest(block, {}, f"block {number}", "rollout_correction.md", 0)
        test.globs = names
        runner.run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("0.5_5", "is 0.5_5 without quotes in example.yaml, line 7, which YAML reads as the number 0.55"),
        ("5_10", "is 5_10 without quotes in example.yaml, line 7, which YAML reads as the number 510"),
        ("0.55", "is 0.55, below 1"),
        ("510", "is 510: YAML reads an unquoted 5_10"),
        (".nan", "is not a number"),
        ("0", "is no finite number above 0"),
        ("true", "is True, of type bool"),
    ],
)
def test_a_trap_is_refused(tmp_path: Path, written: str, found: str) -> None:
    assert f"`{written}`" in section_text("Traps of YAML")
    text = "algorithm:\n  rollout_correction:\n    rollout_is_threshold: {}\n    rollout_is: token\n"
    with pytest.raises(ConfigError, match=re.escape(found)):
        load(tmp_path, text.format(written))


@pytest.mark.parametrize(
    ("written", "bounds"), [("0.5_2.0", (0.5, 2.0)), ('"0.5_5"', (0.5, 5.0)), ("510.0", (None, 510.0))]
)
def test_what_is_no_trap_loads(tmp_path: Path, written: str, bounds: tuple[float | None, float]) -> None:
    text = f"algorithm:\n  rollout_correction: {{rollout_is: token, rollout_is_threshold: {written}}}\n"
    section = load(tmp_path, text).algorithm.rollout_correction
    assert section is not None
    assert (section.spec.rules[0].lower, section.spec.rules[0].upper) == bounds


def test_a_list_on_the_command_line_is_quoted_as_the_page_says(tmp_path: Path) -> None:
    load(tmp_path, "save_steps: 0\n")
    section = "algorithm.rollout_correction"
    overrides = [f'{section}.rollout_rs="token_k1,seq_max_k2"', f'{section}.rollout_rs_threshold="0.6_1.6,2.5"']
    config = load_config("example", overrides=overrides, config_path=tmp_path)
    assert config.algorithm.rollout_correction is not None
    first, second = config.algorithm.rollout_correction.spec.rules
    assert (first.lower, first.upper, second.upper) == (0.6, 1.6, 2.5)


def test_every_option_of_rejection_is_in_the_table() -> None:
    named = {name for row in cells(section_text("Options of `rollout_rs`")) for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {*RATIO_OPTIONS, *DIVERGENCE_OPTIONS}


# Metrics


def _expand(pattern: str) -> Iterator[str]:
    """``a_{b,c}`` is a_b and a_c; ``{rule}`` and ``{bucket}`` stay."""
    parts = re.split(r"(\{[^}]*,[^}]*\})", pattern)
    choices = [part[1:-1].split(",") if part.startswith("{") and "," in part else [part] for part in parts]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _documented(prefix: str) -> set[str]:
    rows = cells(section_text(f"Under `{prefix}`"))[1:]
    named = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row[0])]
    found = [name for pattern in named for name in _expand(pattern)]
    assert len(found) == len(set(found))
    return set(found)


def _made(prefix: str) -> set[str]:
    """The names that are made with all presets and some more, buckets and rules by their placeholders."""
    sections = [RolloutCorrectionConfig(preset=name) for name in PRESETS]
    sections.append(RolloutCorrectionConfig(rollout_rs="geometric", rollout_rs_threshold="0.9_1.25"))
    names: set[str] = set()
    for section in sections:
        spec = section.spec
        for name in correction_metrics(compute_correction(_inputs(), spec).states, spec):
            names.add(_placeholders(name, spec))
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _inputs() -> CorrectionInputs:
    old = torch.tensor([[-1.0, -0.5, -2.0, -0.25], [-0.75, -1.5, -0.125, -3.0]])
    rollout = torch.tensor([[-1.1, -0.45, -2.6, -0.3], [-0.5, -1.5, -0.25, -1.0]])
    return CorrectionInputs(
        train_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=torch.ones(2, 4),
        versions_behind=torch.zeros(2, 4, dtype=torch.int64),
        advantages=torch.ones(2, 4),
    )


def _placeholders(name: str, spec: CorrectionSpec) -> str:
    name = re.sub(r"/by_(position|lag)/[^/]+/", r"/by_\1/{bucket}/", name)
    for label in sorted({rule.label for rule in spec.rules if rule.rejects}, key=len, reverse=True):
        name = re.sub(rf"^(rollout_corr/rollout_rs_){label}(_\d)?_", r"\1{rule}_", name)
    return name


@pytest.mark.parametrize("prefix", ["rollout_corr/", "mismatch/"])
def test_the_table_of_metrics_has_every_one_and_no_other(prefix: str) -> None:
    assert _documented(prefix) == _made(prefix)


def test_the_buckets_are_those_of_the_page() -> None:
    positions, lags = (", ".join(bucket_names(edges)) for edges in (POSITION_EDGES, LAG_EDGES))
    assert f"Buckets of positions: {positions}. Of lag: {lags}." in TEXT


# Links and figures


def test_links_within_the_page_lead_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert targets
    assert targets <= anchors


def test_a_wrong_number_in_the_worked_example_is_found() -> None:
    """Negative control: with another cut in the first block the weights are not those printed."""
    block = PYTHON_BLOCKS[0].replace("rollout_is_threshold=1.2", "rollout_is_threshold=1.3")
    test = doctest.DocTestParser().get_doctest(block, {}, "changed", "rollout_correction.md", 0)
    messages: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=messages.append)
    assert "[0.6065, 1.284, 0.0, 0.0]" in "".join(messages)
