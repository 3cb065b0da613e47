"""The table of settings on which repeatable runs depend, its rows by area, and their look-up.

Contract: imports no torch.
"""

from mock_scheduler.determinism.settings.lookup import (
    AREAS,
    FAMILIES,
    SETTINGS,
    environment_settings,
    find_setting,
    is_deterministic_mode,
    recorded_names,
    required_lines,
)
from mock_scheduler.determinism.settings.required import DETERMINISTIC_MODE
from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting

__all__ = [
    "AREAS",
    "DETERMINISTIC_MODE",
    "FAMILIES",
    "SETTINGS",
    "Between",
    "Family",
    "Kind",
    "ReadAt",
    "Setting",
    "environment_settings",
    "find_setting",
    "is_deterministic_mode",
    "recorded_names",
    "required_lines",
]
