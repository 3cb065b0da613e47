"""Completes names of configurations and their keys for a shell."""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.config.base import effects_of
from mock_scheduler.config.locating import list_configs, locate_config
from mock_scheduler.config.stored_code import Use
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.program import check_stored_code, find_program


def complete_config(incomplete: str, config_path: str | None) -> list[str]:
    """List names of configurations, and YAML files at the place that was begun, that go on as ``incomplete`` does."""
    folder = Path(incomplete).parent
    prefix = "" if "/" not in incomplete else f"{folder}/"
    files = [f"{prefix}{path.name}" for path in folder.glob("*.yaml")] if config_path is None else []
    names = [] if prefix else list_configs(config_path)
    return sorted(name for name in {*names, *files} if name.startswith(incomplete))


def complete_key(incomplete: str, config_name: str | None, config_path: str | None) -> list[str]:
    """List ``key=`` for the keys of a configuration's program; none where its program is not found."""
    if not config_name or "=" in incomplete:
        return []
    try:
        name, folder = locate_config(config_name, config_path)
        check_stored_code(name, folder, use=Use.LOAD, run_stored_code=False)
        keys = effects_of(find_program(name, folder).schema).by_key
    except MockSchedulerError:
        return []
    return sorted(f"{key}=" for key in keys if key.startswith(incomplete))
