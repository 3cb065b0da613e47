"""Alignments of the fake training without processes: each run is made in this one, by its run file and its words."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mock_scheduler.alignment.executors.protocol import LaunchRun
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.command_program.command import Command
from mock_scheduler.command_program.entry import run_command
from mock_scheduler.command_program.program import own_config
from tests.command_program.fake_training import parse, train

TP2, DP2 = "parallel.tensor_model_parallel_size=2", "parallel.data_parallel_size=2"
CONFIG: dict[str, Any] = {
    "command": ["{python}", "fake_training.py", "--num-processes", "{world_size}", "--lr", "{options.lr}"],
    "arguments": {
        "parallel.tensor_model_parallel_size": {2: ["--layout", "tp2"]},
        "parallel.data_parallel_size": {2: ["--layout", "dp2"]},
        "options": {
            "layers": ["--layers", "{}"],
            "fault": ["--fault", "{}"],
            "recompute": {True: [], False: []},
        },
    },
    "options": {"lr": 0.01, "layers": 2, "fault": None, "recompute": False},
    "effects": {"recompute": "nothing", "lr": "training"},
    "reductions": {"options.layers": 1},
    "exp_name": "fake",
}


def write_config(folder: Path, candidates: Mapping[str, Sequence[str]] = {}, **values: Any) -> Path:
    """Writes the configuration with these candidates, by name; returns the path of its file."""
    listed = [{"name": name, "overrides": list(overrides)} for name, overrides in candidates.items()]
    align = {"candidates": listed, **values.pop("align", {})}
    content = {**CONFIG, "output_dir": str(folder / "out"), "align": align, **values}
    path = folder / "fake.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


@dataclass(slots=True)
class Runs:
    """Makes runs in this process. made: their names. before: called with the name of each before it."""

    made: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda name: None

    def make_launch(self, config_name: str, config_path: Path) -> LaunchRun:
        """Gives the function that starts runs, as a ``MakeLaunch``."""

        def launch(run: PlannedRun) -> int:
            self.before(run.name)
            self.made.append(run.name)
            return self._run(run, config_path)

        return launch

    def _run(self, run: PlannedRun, folder: Path) -> int:
        output = io.StringIO()

        def start(command: Command, timeout_s: float | None) -> int:
            assert command.env["MOCK_SCHEDULER_RUN"] == str(command.run_file)
            with redirect_stdout(output):
                return train(command.run, parse(list(command.words[2:])))

        code = run_command(own_config(run.config), folder=folder, start=start)
        run.log_path.write_text(output.getvalue(), encoding="utf-8")
        return code
