"""Plays Gymnasium's FrozenLake with its board as text.

Glyphs: ``P`` player, ``_`` frozen or start, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player on the goal.
Reward 1 on reaching the goal; a turn without an action costs ``format_penalty`` and nothing else. The episode ends in
a hole and on the goal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumFrozenLake
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from numpy.typing import NDArray

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import FrozenLakeEnvConfig
from pipelines.environments.base import UNKNOWN_LENGTH, Split
from pipelines.environments.grid_env import GridEnv, Move
from pipelines.environments.kinds import FROZEN_LAKE
from pipelines.environments.seeds import check_split, derive_seed, is_in_split, max_draws

_PLAYER, _FROZEN, _HOLE, _GOAL, _PLAYER_IN_HOLE, _PLAYER_ON_GOAL = tuple(FROZEN_LAKE.glyphs)
# By gymnasium's letter of the cell.
_PLAIN = {"S": _FROZEN, "F": _FROZEN, "H": _HOLE, "G": _GOAL}
_UNDER_PLAYER = {"S": _PLAYER, "F": _PLAYER, "H": _PLAYER_IN_HOLE, "G": _PLAYER_ON_GOAL}


class _Lake(Protocol):
    """Gymnasium's FrozenLake with the annotations that it lacks; ``desc``: the map, a letter per cell."""

    desc: NDArray[Any]

    def reset(self, *, seed: int) -> tuple[int, dict[str, float]]: ...

    def step(self, a: int) -> tuple[int, float, bool, bool, dict[str, float]]: ...

    def close(self) -> None: ...


class FrozenLakeEnv(GridEnv):
    """Plays one FrozenLake: the named map, or a random one for each episode's seed.

    Raises ``ConfigError`` for a split without layouts.
    """

    def __init__(
        self,
        *,
        settings: FrozenLakeEnvConfig | None = None,
        max_steps: int = 100,
        split: Split = "all",
    ) -> None:
        self._settings = settings or FrozenLakeEnvConfig()
        self._split = split
        check_split(split, self._settings.held_out_fraction)
        num_cells = FROZEN_LAKE.board_size(self._settings) ** 2
        glyphs, num_actions = FROZEN_LAKE.glyphs, len(FROZEN_LAKE.actions)
        super().__init__(num_cells=num_cells, glyphs=glyphs, num_actions=num_actions, max_steps=max_steps)
        self._lake: _Lake | None = None
        self._board = ""
        self._state = 0

    @property
    def invalid_reward(self) -> float:
        """Returns the penalty alone: nothing moves."""
        return self._settings.format_penalty

    def close(self) -> None:
        """Close gymnasium's environment."""
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def _start(self, seed: int) -> int:
        settings = self._settings
        if self._lake is None or settings.map_name is None:
            self.close()
            lake = GymnasiumFrozenLake(
                desc=None if settings.map_name else draw_map(settings, split=self._split, seed=seed),
                map_name=settings.map_name or "4x4",  # not looked at where there is a map
                is_slippery=settings.is_slippery,
            )
            self._lake = cast("_Lake", lake)
        self._state, _ = self._lake.reset(seed=seed)
        rows = [b"".join(row).decode() for row in self._lake.desc]
        self._board = "".join(rows)
        return UNKNOWN_LENGTH if settings.is_slippery else shortest_path(rows)

    def _move(self, action: int) -> Move:
        assert self._lake is not None  # there is an episode
        self._state, reward, terminated, _, _ = self._lake.step(action)
        is_success = terminated and self._board[self._state] == "G"
        return Move(reward=float(reward), terminated=bool(terminated), is_success=is_success)

    def _render_board(self) -> str:
        cells = (
            (_UNDER_PLAYER if cell == self._state else _PLAIN)[content] for cell, content in enumerate(self._board)
        )
        return "".join(cells)


def draw_map(settings: FrozenLakeEnvConfig, *, split: Split, seed: int) -> list[str]:
    """Draws gymnasium's random map of ``seed`` or, where ``split`` may not play it, of seeds derived from it.

    Raises:
        ConfigError: none of the maps drawn is in the split.
    """
    num_draws = max_draws(split, settings.held_out_fraction)
    for draw in range(num_draws):
        drawn_seed = seed if draw == 0 else derive_seed(seed, "map", draw)
        rows = generate_random_map(settings.size, settings.p, seed=drawn_seed)
        if is_in_split(rows, split, settings.held_out_fraction):
            return rows
    raise ConfigError(
        f"frozen_lake: none of {num_draws} random maps of size {settings.size} and p {settings.p} is in the split "
        f"'{split}' with held_out_fraction {settings.held_out_fraction}: set a larger size, another p, or another "
        "held_out_fraction"
    )


def shortest_path(rows: Sequence[str]) -> int:
    """Counts the moves from the start to the goal around the holes of a square map; -1 where there is no way."""
    size = len(rows)
    start = next((row, column) for row in range(size) for column in range(size) if rows[row][column] == "S")
    reached, edge = {start}, [start]
    length = 0
    while edge:
        length += 1
        found = []
        for row, column in edge:
            for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if cell in reached or not (0 <= cell[0] < size and 0 <= cell[1] < size):
                    continue
                letter = rows[cell[0]][cell[1]]
                if letter == "G":
                    return length
                if letter != "H":
                    reached.add(cell)
                    found.append(cell)
        edge = found
    return UNKNOWN_LENGTH
