"""Lists the kinds of environments by ``env_type``: where each is and which tokens it speaks.

Another environment is one entry of ``ENVIRONMENT_KINDS`` and one module with a ``GridEnv``; its glyphs and actions have
a module of their own, so that a tokenizer is built without gymnasium.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.environments import frozen_lake_alphabet, sokoban_alphabet


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentKind:
    """One ``env_type``. ``entry_point``: module and class, as gymnasium imports them.

    ``board_size``: from the settings to the cells along one side of the board that the tokens show.
    ``player_glyphs``: those of ``glyphs`` that show the player's cell.
    """

    gymnasium_id: str
    entry_point: str
    glyphs: str
    player_glyphs: str
    actions: tuple[str, ...]
    board_size: Callable[[Any], int]


ENVIRONMENT_KINDS: Mapping[str, EnvironmentKind] = {
    "frozen_lake": EnvironmentKind(
        gymnasium_id="mock_scheduler/FrozenLake-v0",
        entry_point="pipelines.environments.frozen_lake:FrozenLakeEnv",
        glyphs=frozen_lake_alphabet.GLYPHS,
        player_glyphs=frozen_lake_alphabet.PLAYER_GLYPHS,
        actions=frozen_lake_alphabet.ACTIONS,
        board_size=frozen_lake_alphabet.board_size,
    ),
    "sokoban": EnvironmentKind(
        gymnasium_id="mock_scheduler/Sokoban-v0",
        entry_point="pipelines.environments.sokoban:SokobanEnv",
        glyphs=sokoban_alphabet.GLYPHS,
        player_glyphs=sokoban_alphabet.PLAYER_GLYPHS,
        actions=sokoban_alphabet.ACTIONS,
        board_size=sokoban_alphabet.board_size,
    ),
}
