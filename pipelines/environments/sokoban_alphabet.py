"""The glyphs and actions of Sokoban's tokens; imports no gymnasium, so that a tokenizer can be built without it."""

from __future__ import annotations

from pipelines.config.environments import SokobanEnvConfig

# Their order is that of the vocabulary: changing it changes what recorded token ids mean.
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = GLYPHS = "#_O√XPS"
PLAYER_GLYPHS = PLAYER + PLAYER_ON_TARGET
ACTIONS = ("Up", "Down", "Left", "Right")


def board_size(settings: SokobanEnvConfig) -> int:
    """Cells along one side of the board that the tokens show."""
    return settings.size if settings.show_walls_around else settings.size - 2
