"""Runs are processes of this machine, which end with this one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from mock_scheduler.alignment.executors.protocol import LaunchRun
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import RunningProcesses, plan_launch, run_plan
from mock_scheduler.launch.warm_start import WarmStarts


def make_process_launch(config_name: str, config_path: Path) -> LaunchRun:
    """Makes runs processes, through the launcher; their terminal output goes to each run's log."""
    return _ProcessLaunch(config_name=config_name, config_path=config_path)


def make_separate_launch(config_name: str, config_path: Path) -> LaunchRun:
    """Makes runs processes with nothing in common, not even addresses, to tell whether a run repeats itself."""
    return _ProcessLaunch(config_name=config_name, config_path=config_path, warm=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProcessLaunch:
    """Starts the processes of runs of one configuration, from any thread, and can end them."""

    config_name: str
    config_path: Path
    running: RunningProcesses = field(default_factory=RunningProcesses)
    warm: WarmStarts | None = field(default_factory=WarmStarts)

    def __call__(self, run: PlannedRun) -> int:
        """Starts the processes and waits for them, as a ``LaunchRun``."""
        source = ConfigSource(
            config_name=self.config_name, config_path=str(self.config_path), overrides=tuple(run.overrides)
        )
        plan = plan_launch(
            run.config,
            run.program.arguments(run.entry, source),
            num_processes=run.program.num_processes(run.config),
            python=run.python,
        )
        # A module of the user's may say what is imported, and from where, before anything else is.
        preload = () if run.own_module else run.program.preload
        plan = replace(plan, env={**plan.env, **run.env}, preload=preload)
        return run_plan(plan, log_path=run.log_path, running=self.running, warm=self.warm)

    def end_running(self) -> None:
        """Ends the processes that other threads wait for."""
        self.running.end()
