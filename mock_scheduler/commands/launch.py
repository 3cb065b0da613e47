"""``mock-scheduler launch`` runs a configuration on the processes of its layout.

Two other modules of the program run in a process of their own: ``replay-actions`` plays recorded actions through the
environments again, and ``export-hf`` writes a checkpoint as Hugging Face's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.locating import DEFAULT_PROGRAM
from mock_scheduler.config.stored_code import Use
from mock_scheduler.determinism.environment import check_settings
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.launch.warm_start import WarmStarts
from mock_scheduler.program import check_stored_code, find_program, import_program, load_config
from mock_scheduler.support.processes import PARENT_VARIABLE, ending_signals_as_interrupt
from mock_scheduler.support.terminal_streams import print_message


def run_launch(
    source: ConfigSource,
    *,
    entry: str | None,
    nnodes: int,
    node_rank: int,
    rdzv_endpoint: str | None,
    run_stored_code: bool = False,
) -> int:
    """Start this machine's processes, wait for them and return the exit code of the run.

    ``entry``: the module that every process runs; ``None`` is the program's own. ``run_stored_code``: also run the code
    that a stored configuration names. Raises ``ConfigError`` before anything starts: for the configuration, for
    settings that make no deterministic run, or for a layout that does not divide over the machines.
    """
    _announce(source, run_stored_code=run_stored_code)
    program = find_program(source.config_name, source.config_path)
    config = load_config(source, program)
    if nnodes > 1 and program.num_processes(config) != config.parallel.world_size:
        raise ConfigError(
            "--nnodes is for ranks that this command starts itself; a command reaches machines by launcher"
        )
    check_settings(config.system_envs)
    plan = plan_launch(
        config,
        program.arguments(entry or program.entry, source),
        num_processes=program.num_processes(config),
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
    )
    if entry is not None or plan.num_processes == 1:
        return run_plan(plan)
    # What every rank imports is imported once. A module of the user's may say what is imported, and from where.
    return run_plan(replace(plan, preload=program.preload), warm=WarmStarts())


def run_replay_actions(
    source: ConfigSource,
    recording: str,
    *,
    steps: str | None,
    json_path: Path | None,
    entry: str | None,
    run_stored_code: bool = False,
) -> int:
    """Run the module ``entry``, which writes its result to ``json_path``, and return its exit code.

    ``entry``: ``None`` is the program's own; raises ``ConfigError`` where it has none. The code is 128 + N where signal
    N ended it.
    """
    _announce(source, run_stored_code=run_stored_code)
    module = entry or find_program(source.config_name, source.config_path).replay_entry
    if module is None:
        raise ConfigError("the program of this configuration has no module that plays actions; name one by --entry")
    options = ["--recording", recording, *(["--steps", steps] if steps else [])]
    options += ["--json", str(json_path)] if json_path is not None else []
    return _run_module("mock_scheduler.launch.entry", module, *source.arguments(), *options)


def run_export_hf(checkpoint: Path, folder: Path) -> int:
    """Run the module of the pipeline that writes one of its checkpoints to a new folder; return its exit code."""
    module = import_program(DEFAULT_PROGRAM).export_entry
    if module is None:
        raise ConfigError("this program has no module that writes checkpoints")
    return _run_module(module, str(checkpoint), str(folder))


def _run_module(*arguments: str) -> int:
    """Run a module in a process that ends with this one; return its exit code, 128 + N where signal N ended it."""
    with ending_signals_as_interrupt():
        code = subprocess.run(
            [sys.executable, "-P", "-m", *arguments],
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            check=False,
        ).returncode
    return 128 - code if code < 0 else code


def _announce(source: ConfigSource, *, run_stored_code: bool) -> None:
    """Say on stderr what code a stored configuration names; raise ``ConfigError`` where nobody asked for it."""
    # A run leaves the whole configuration marked as the user's own, an alignment's part too.
    told = check_stored_code(source.config_name, source.config_path, use=Use.ALIGN, run_stored_code=run_stored_code)
    if told:
        print_message(told)
