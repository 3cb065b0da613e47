"""Has the table of settings that make a run repeatable: its rows by area, and functions to look one up.

Contract: imports no torch.
"""

from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting
from mock_scheduler.determinism.settings.table import (
    AREAS,
    DETERMINISTIC_MODE,
    FAMILIES,
    SETTINGS,
    WITHHELD,
    environment_settings,
    find_setting,
    is_deterministic_mode,
    is_documented,
    is_per_node,
    kept_value,
    recorded_names,
    required_lines,
)

__all__ = [
    "AREAS",
    "DETERMINISTIC_MODE",
    "FAMILIES",
    "SETTINGS",
    "WITHHELD",
    "Between",
    "Family",
    "Kind",
    "ReadAt",
    "Setting",
    "environment_settings",
    "find_setting",
    "is_deterministic_mode",
    "is_documented",
    "is_per_node",
    "kept_value",
    "recorded_names",
    "required_lines",
]
