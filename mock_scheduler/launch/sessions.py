"""Several runs in one process group are told by a plan, and tell by a status in each run's folder.

``PLAN.json`` is a list of objects ``{config_name, config_path, overrides, output_dir, log_path}``, one a run, in order.
``{output_dir}/session.json`` says when a run of a session started and how it ended; it is replaced as a whole, so it is
never read half written. Contract: importing this imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import RunConfig
from mock_scheduler.support.files import load_json_object, save_json, written_aside
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.text import bullet_list

#: In a run's ``output_dir``, only where it was part of a session.
STATUS_FILE = "session.json"

_KEYS = ("config_name", "config_path", "overrides", "output_dir", "log_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRun:
    """One run of a session. ``log_path`` gets its terminal output; ``output_dir`` is the configuration's own."""

    config_name: str
    config_path: str
    overrides: tuple[str, ...]
    output_dir: Path
    log_path: Path

    @property
    def source(self) -> ConfigSource:
        """Where its configuration comes from."""
        return ConfigSource(config_name=self.config_name, config_path=self.config_path, overrides=tuple(self.overrides))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The state of a run of a session. ``started_s``: seconds since the epoch. The others: ``None`` while it runs.

    ``elapsed_s``: from its start until another could begin. ``exit_code``: as it would have exited alone.
    """

    started_s: float
    elapsed_s: float | None = None
    exit_code: int | None = None


def write_plan(path: Path, runs: Sequence[SessionRun]) -> None:
    """Writes the plan of a session, and removes the statuses of an earlier session of these runs."""
    content = [
        {
            "config_name": run.config_name,
            "config_path": str(run.config_path),
            "overrides": list(run.overrides),
            "output_dir": str(run.output_dir),
            "log_path": str(run.log_path),
        }
        for run in runs
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for run in runs:
        (Path(run.output_dir) / STATUS_FILE).unlink(missing_ok=True)


def read_plan(path: Path) -> tuple[SessionRun, ...]:
    """Returns the runs of a plan, in order; raises ``ConfigError`` where the file is not one, or has no run."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"session plan {path} cannot be read: {error}") from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"session plan {path} must be a list of at least one run, each with {', '.join(_KEYS)}")
    return tuple(_read_run(item, f"{path}: run {number}") for number, item in enumerate(content))


def _read_run(item: object, where: str) -> SessionRun:
    if not isinstance(item, Mapping) or sorted(item) != sorted(_KEYS):
        found = ", ".join(sorted(item)) if isinstance(item, Mapping) else repr(item)
        raise ConfigError(f"{where} must have exactly the keys {', '.join(_KEYS)}; found {found}")
    texts = [item[key] for key in _KEYS if key != "overrides"]
    overrides = item["overrides"]
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in [*texts, *overrides]):
        raise ConfigError(f"{where}: overrides must be a list of texts, and every other key a text")
    return SessionRun(
        config_name=item["config_name"],
        config_path=item["config_path"],
        overrides=tuple(overrides),
        output_dir=Path(item["output_dir"]),
        log_path=Path(item["log_path"]),
    )


def check_session(runs: Sequence[SessionRun], configs: Sequence[RunConfig | None]) -> None:
    """Refuses runs without a common form of processes. ``configs``: theirs; a run with ``None`` is left out.

    Raises ``ConfigError`` with a list of all runs with another number of processes or other ``system_envs`` than the
    first (the environment is read once, when libraries are imported), with another ``output_dir`` than their
    configuration's, or with the ``output_dir`` of another run.
    """
    known = [(run, config) for run, config in zip(runs, configs, strict=True) if config is not None]
    problems = [
        f"{folder} is the output_dir of {count} runs"
        for folder, count in Counter(str(run.output_dir.absolute()) for run in runs).items()
        if count > 1
    ]
    for run, config in known:
        problems += _describe_other(run, config, *known[0])
    if problems:
        raise ConfigError(f"these runs cannot share processes:{bullet_list(problems, limit=None)}\nStart them apart.")


def _describe_other(run: SessionRun, config: RunConfig, first_run: SessionRun, first: RunConfig) -> Iterator[str]:
    """Yields the reasons why a run cannot follow the first one; runs are named by their folders."""
    name, first_name = run.output_dir, first_run.output_dir
    if config.parallel.world_size != first.parallel.world_size:
        yield (
            f"{name} ({config.parallel.describe()}) needs {config.parallel.world_size} processes, and {first_name} "
            f"({first.parallel.describe()}) {first.parallel.world_size}"
        )
    for key in sorted(config.system_envs.keys() | first.system_envs.keys()):
        found, expected = config.system_envs.get(key, "not set"), first.system_envs.get(key, "not set")
        if found != expected:
            yield f"system_envs.{key} is {found} in {name} and {expected} in {first_name}"
    if Path(config.output_dir).absolute() != run.output_dir.absolute():
        yield f"{name} has another output_dir in its configuration: {config.output_dir}"


def write_status(output_dir: Path, status: RunStatus) -> None:
    """Write the state of a run; one rank calls it. Makes the folder."""
    output_dir.mkdir(parents=True, exist_ok=True)
    save_json(
        output_dir / STATUS_FILE,
        {"started_s": status.started_s, "elapsed_s": status.elapsed_s, "exit_code": status.exit_code},
    )


def load_status(output_dir: Path) -> RunStatus | None:
    """Reads the state of a run of a session; ``None`` before its beginning. Raises ``OSError`` for any other file."""
    path = output_dir / STATUS_FILE
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = load_json_object(path)
        return RunStatus(started_s=content["started_s"], elapsed_s=content["elapsed_s"], exit_code=content["exit_code"])
    except (KeyError, ValueError) as error:
        raise OSError(f"{path} is not the status of a session's run: {error}") from error


def find_running(plan_path: Path) -> Path | None:
    """Returns the ``output_dir`` of the going run of a session; ``None`` where none has begun, or all have ended."""
    for run in read_plan(plan_path):
        status = load_status(run.output_dir)
        if status is not None and status.elapsed_s is None:
            return run.output_dir
    return None
