"""``mock-scheduler launch``: runs a configuration on as many processes as its layout needs."""

from __future__ import annotations

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.program import find_program, load_config


def run_launch(
    source: ConfigSource, *, entry: str | None, nnodes: int, node_rank: int, rdzv_endpoint: str | None
) -> int:
    """Start this machine's processes, wait for them and return the exit code of the run.

    ``entry``: the module that every process runs; ``None`` is the program's own. Raises ``ConfigError`` before anything
    starts: for the configuration, for settings that make no deterministic run, or for a layout that does not divide
    over the machines.
    """
    program = find_program(source.config_name, source.config_path)
    config = load_config(source, program)
    check_settings(config.system_envs)
    plan = plan_launch(
        config,
        program.arguments(entry or program.entry, source),
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
    )
    return run_plan(plan)
