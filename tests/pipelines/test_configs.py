"""Every shipped configuration loads, and its run and its alignment can be planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.determinism.environment import check_settings
from pipelines.config.loading import load_config
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.model import find_idle_vocabulary
from pipelines.program import PROGRAM
from tests.programs import run_program

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_loads_and_is_deterministic(name: str) -> None:
    config = load_config(name, config_path=CONFIGS)
    assert config.exp_name == name
    assert config.system_envs["DETERMINISTIC_MODE"] == "1"
    check_settings(config.system_envs)
    assert build_tokenizer(config).vocab_size > 0


@pytest.mark.parametrize("name", [name for name in NAMES if load_config(name, config_path=CONFIGS).align.candidates])
def test_every_shipped_alignment_can_be_planned(name: str, tmp_path: Path) -> None:
    """Each candidate's overrides load, and its entry is a module that exists."""
    plan = plan_alignment(
        lambda overrides: load_config(name, config_path=CONFIGS, overrides=overrides),
        program=PROGRAM,
        overrides=[],
        output_dir=tmp_path,
    )
    for candidate in plan.candidates:
        assert (CONFIGS.parent / (candidate.entry.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize(
    ("name", "idle"),
    # The quickstart's policy chooses among four actions, which lie on the first rank; its verdicts say so.
    [("computation_options", []), ("experts", []), ("quickstart", [1])],
)
def test_tensor_parallel_candidates_exercise_every_part_of_the_vocabulary(name: str, idle: list[int]) -> None:
    config = load_config(name, config_path=CONFIGS)
    tokenizer = build_tokenizer(config)
    overrides = [item.overrides for item in config.align.candidates]
    layouts = [load_config(name, config_path=CONFIGS, overrides=[*own]).parallel for own in overrides]
    split = [item.tensor_model_parallel_size for item in layouts if item.tensor_model_parallel_size > 1]
    assert split
    allowed = tokenizer.action_ids if config.actor_infer.only_action_tokens else None
    for tp_size in split:
        assert find_idle_vocabulary(allowed, tokenizer.vocab_size, multiple_of=1, tp_size=tp_size) == idle


def test_every_planted_fault_of_the_configurations_can_be_planted() -> None:
    """One named a module that had moved: its candidate failed, and was incomparable in the place of diverged."""
    entries = {
        candidate.entry
        for name in NAMES
        for candidate in load_config(name, config_path=CONFIGS).align.candidates
        if candidate.entry is not None and candidate.entry.startswith("tests.faults.")
    }
    assert len(entries) >= 4
    done = run_program("tests.faults.plant_all", sorted(entries))
    assert done.returncode == 0, done.stderr
