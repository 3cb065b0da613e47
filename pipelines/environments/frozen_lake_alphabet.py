"""The glyphs and actions of FrozenLake's tokens; imports no gymnasium, so that a tokenizer can be built without it."""

from __future__ import annotations

from pipelines.config.environments import FrozenLakeEnvConfig

# Their order is that of the vocabulary: changing it changes what recorded token ids mean.
PLAYER, FROZEN, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_ON_GOAL = GLYPHS = "P_OGX√"
PLAYER_GLYPHS = PLAYER + PLAYER_IN_HOLE + PLAYER_ON_GOAL
ACTIONS = ("Left", "Down", "Right", "Up")  # by gymnasium's number of the action

# By gymnasium's letter of the cell.
PLAIN = {"S": FROZEN, "F": FROZEN, "H": HOLE, "G": GOAL}
UNDER_PLAYER = {"S": PLAYER, "F": PLAYER, "H": PLAYER_IN_HOLE, "G": PLAYER_ON_GOAL}

_NAMED_MAP_SIZE = 4


def board_size(settings: FrozenLakeEnvConfig) -> int:
    """Cells along one side of the board."""
    return _NAMED_MAP_SIZE if settings.map_name else settings.size
