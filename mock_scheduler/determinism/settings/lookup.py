"""The table of settings on which repeatable runs and their bits depend.

Contract: imports no torch. The environment of the launchers, the check at the start, the read-back and the
documentation all come from this one table; the modules beside this one hold its rows by area.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mock_scheduler.determinism.settings.devices import DEVICE_SETTINGS
from mock_scheduler.determinism.settings.nccl import NCCL_FAMILIES, NCCL_SETTINGS
from mock_scheduler.determinism.settings.process import PROCESS_SETTINGS
from mock_scheduler.determinism.settings.required import DETERMINISTIC_MODE, REQUIRED_SETTINGS
from mock_scheduler.determinism.settings.setting import Family, Kind, Setting
from mock_scheduler.determinism.settings.torch_flags import TORCH_FAMILIES, TORCH_SETTINGS
from mock_scheduler.determinism.settings.transformer_engine import (
    TRANSFORMER_ENGINE_FAMILIES,
    TRANSFORMER_ENGINE_SETTINGS,
)
from mock_scheduler.determinism.settings.versions import VERSION_SETTINGS

AREAS: dict[str, tuple[Setting, ...]] = {
    "Required in system_envs": REQUIRED_SETTINGS,
    "Process and CPU": PROCESS_SETTINGS,
    "torch and compilers": TORCH_SETTINGS,
    "Collectives": NCCL_SETTINGS,
    "GPU libraries": DEVICE_SETTINGS,
    "Attention and TransformerEngine": TRANSFORMER_ENGINE_SETTINGS,
    "Versions and hardware": VERSION_SETTINGS,
}

SETTINGS: tuple[Setting, ...] = tuple(setting for area in AREAS.values() for setting in area)

# The longest prefix decides.
FAMILIES: tuple[Family, ...] = tuple(
    sorted(
        (*NCCL_FAMILIES, *TORCH_FAMILIES, *TRANSFORMER_ENGINE_FAMILIES),
        key=lambda family: len(family.prefix),
        reverse=True,
    )
)

_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def environment_settings() -> list[Setting]:
    """Returns the rows of environment variables."""
    return [setting for setting in SETTINGS if setting.kind is Kind.ENVIRONMENT]


def required_lines() -> list[str]:
    """Returns the lines of ``system_envs`` every deterministic run has."""
    return [setting.yaml_line for setting in SETTINGS if setting.required]


def find_setting(name: str) -> Setting | None:
    """Returns the table's row for a name; members of a family such as ``NVTE_*`` have one; else ``None``."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family in FAMILIES:
        if name.startswith(family.prefix):
            return family.setting(name)
    return None


def recorded_names(environ: Iterable[str]) -> list[str]:
    """Returns every listed environment variable, and every present member of a family, sorted."""
    prefixes = tuple(family.prefix for family in FAMILIES)
    listed = {setting.name for setting in environment_settings()}
    return sorted({*listed, *(name for name in environ if name.startswith(prefixes))})


def is_deterministic_mode(environ: Mapping[str, str]) -> bool:
    """Whether ``DETERMINISTIC_MODE`` is ``1`` in this environment or ``system_envs``."""
    return environ.get(DETERMINISTIC_MODE) == "1"
