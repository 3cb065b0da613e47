"""Sokoban with its board as text: push every box onto a target.

Glyphs: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player, ``S`` player on a
target. A move into a wall, or against a box that cannot move, changes nothing and is a valid turn. The rewards are
those of gym-sokoban 0.0.6 (``SokobanEnvConfig``): a push from one target to the next counts as neither coming nor
leaving. A turn without an action is a turn that moves nothing, with ``format_penalty`` added to its reward, sparse
rewards included. The episode ends when all boxes are on targets.
"""

from __future__ import annotations

from pipelines.config.environments import SokobanEnvConfig
from pipelines.environments.base import Split
from pipelines.environments.grid_env import GridEnv, Move
from pipelines.environments.held_out import check_split
from pipelines.environments.sokoban_alphabet import ACTIONS, GLYPHS
from pipelines.environments.sokoban_puzzles import generate_puzzle, render


class SokobanEnv(GridEnv):
    """One Sokoban; every episode's puzzle follows from its seed.

    Raises ``ConfigError`` for a split that the settings do not make.
    """

    def __init__(
        self,
        *,
        settings: SokobanEnvConfig | None = None,
        max_steps: int = 120,
        split: Split = "all",
    ) -> None:
        self._settings = settings or SokobanEnvConfig()
        self._split = split
        check_split(split, self._settings.held_out_fraction)
        size = self._settings.size
        shown = range(size) if self._settings.show_walls_around else range(1, size - 1)
        self._shown_cells = [row * size + column for row in shown for column in shown]
        self._offsets = (-size, size, -1, 1)  # by number of the action
        super().__init__(num_cells=len(self._shown_cells), glyphs=GLYPHS, num_actions=len(ACTIONS), max_steps=max_steps)
        self._walls: frozenset[int] = frozenset()
        self._targets: frozenset[int] = frozenset()
        self._boxes: set[int] = set()
        self._player = 0

    @property
    def invalid_reward(self) -> float:
        """That of a turn that moves nothing, with the penalty."""
        return self._turn_reward + self._settings.format_penalty

    @property
    def _turn_reward(self) -> float:
        return 0.0 if self._settings.sparse_reward else self._settings.step_penalty

    def _start(self, seed: int) -> int:
        puzzle = generate_puzzle(self._settings, split=self._split, seed=seed)
        self._walls, self._targets = puzzle.walls, puzzle.targets
        self._boxes, self._player = set(puzzle.boxes), puzzle.player
        return puzzle.optimal_length

    def _move(self, action: int) -> Move:
        offset = self._offsets[action]
        on_target_before = len(self._boxes & self._targets)
        cell, beyond = self._player + offset, self._player + 2 * offset
        if cell in self._boxes and beyond not in self._walls and beyond not in self._boxes:
            self._boxes.remove(cell)
            self._boxes.add(beyond)
        if cell not in self._walls and cell not in self._boxes:
            self._player = cell
        is_solved = self._boxes == self._targets
        num_gained = len(self._boxes & self._targets) - on_target_before
        return Move(reward=self._reward(num_gained, is_solved), terminated=is_solved, is_success=is_solved)

    def _reward(self, num_gained: int, is_solved: bool) -> float:
        settings = self._settings
        if settings.sparse_reward:
            return 1.0 if is_solved else 0.0
        return settings.step_penalty + num_gained * settings.box_reward + is_solved * settings.solved_reward

    def _render_board(self) -> str:
        settings = self._settings
        board = render(settings.size, walls=self._walls, targets=self._targets, boxes=self._boxes, player=self._player)
        return "".join(board[cell] for cell in self._shown_cells)
