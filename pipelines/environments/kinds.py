"""The kinds of environments by ``env_type``: where each one is, and the glyphs and actions of its tokens.

Another environment is one entry of ``ENVIRONMENT_KINDS`` and one module with a ``GridEnv``. Contract: imports no
gymnasium, so a tokenizer can be built without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.config.environments import FrozenLakeEnvConfig, SokobanEnvConfig

_NAMED_MAP_SIZE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentKind:
    """Holds one ``env_type``. ``entry_point``: module and class, as gymnasium imports them.

    ``glyphs``: all contents of a cell; ``player_glyphs``: the ones among them that show the player's cell.
    ``board_size``: from the settings to the cells along one side of the board that the tokens show.
    """

    gymnasium_id: str
    entry_point: str
    glyphs: str
    player_glyphs: str
    actions: tuple[str, ...]
    board_size: Callable[[Any], int]


def _lake_size(settings: FrozenLakeEnvConfig) -> int:
    return _NAMED_MAP_SIZE if settings.map_name else settings.size


def _warehouse_size(settings: SokobanEnvConfig) -> int:
    return settings.size if settings.show_walls_around else settings.size - 2


# The order of glyphs and of actions is that of the vocabulary: changing it changes the meaning of recorded token ids.
FROZEN_LAKE = EnvironmentKind(
    gymnasium_id="mock_scheduler/FrozenLake-v0",
    entry_point="pipelines.environments.frozen_lake:FrozenLakeEnv",
    glyphs="P_OGX√",
    player_glyphs="PX√",
    actions=("Left", "Down", "Right", "Up"),  # by gymnasium's number of the action
    board_size=_lake_size,
)
SOKOBAN = EnvironmentKind(
    gymnasium_id="mock_scheduler/Sokoban-v0",
    entry_point="pipelines.environments.sokoban:SokobanEnv",
    glyphs="#_O√XPS",
    player_glyphs="PS",
    actions=("Up", "Down", "Left", "Right"),
    board_size=_warehouse_size,
)

ENVIRONMENT_KINDS: Mapping[str, EnvironmentKind] = {"frozen_lake": FROZEN_LAKE, "sokoban": SOKOBAN}
