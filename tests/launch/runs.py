"""Plans of real runs for the tests of launching."""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import LaunchPlan, plan_launch
from mock_scheduler.program import find_program, load_config

ROOT = Path(__file__).parents[2]


def plan_quickstart(output_dir: Path, *overrides: str) -> LaunchPlan:
    """The quickstart for a step, without validation."""
    own = ("max_steps=1", "eval_steps=0", "track_with=none", f"output_dir={output_dir}")
    source = ConfigSource(config_name="quickstart", config_path=str(ROOT / "configs"), overrides=(*own, *overrides))
    program = find_program(source.config_name, source.config_path)
    return plan_launch(load_config(source, program), program.arguments(program.entry, source))
