"""Plays Sokoban with its board as text: push every box onto a target.

Glyphs: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player, ``S`` player on a
target. A move into a wall, or against a box that cannot move, changes nothing and is a valid turn. Rewards are
gym-sokoban 0.0.6's (``SokobanEnvConfig``): a push from one target to the next counts as neither coming nor leaving. A
turn without an action moves nothing, and ``format_penalty`` is added to its reward, sparse rewards included. The
episode ends when all boxes are on targets.

A puzzle is made backwards: random walls and targets, then a breadth-first search over (player, boxes) from every
solved state, in which the player walks or pulls. A state's depth is the number of moves of its shortest solution. So a
puzzle is a choice of depth, uniform over the depths found, and then of a state at this depth; at a depth of 1 or more
it is solvable and not solved.

Contract: a puzzle follows from (settings, split, seed) alone. Draws use ``random.Random.random``, the one method whose
numbers Python promises to keep.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import SokobanEnvConfig
from pipelines.environments.base import Split
from pipelines.environments.grid_env import GridEnv, Move
from pipelines.environments.kinds import SOKOBAN
from pipelines.environments.seeds import check_split, is_in_split

_WALL, _FLOOR, _TARGET, _BOX_ON_TARGET, _BOX, _PLAYER, _PLAYER_ON_TARGET = tuple(SOKOBAN.glyphs)
_MAX_LAYOUTS = 1000
_DRAWS_PER_LAYOUT = 32
# The share of the cells within the outer wall. On the smallest board it makes each number of walls about as frequent as
# its different puzzles.
_WALL_SHARE = 0.25
# No layer is searched once so many states are known, which bounds the time of large boards (about 0.1 s); all depths
# searched until then are exact.
_MAX_STATES = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzle:
    """Holds a board of ``size`` × ``size`` cells, numbered row by row: sets of cells, and the player's cell.

    ``optimal_length``: moves of the shortest solution.
    """

    size: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int
    optimal_length: int

    def rows(self) -> tuple[str, ...]:
        """Renders a string for each row, the outer wall included."""
        text = render(self.size, walls=self.walls, targets=self.targets, boxes=self.boxes, player=self.player)
        return tuple(text[start : start + self.size] for start in range(0, len(text), self.size))


def render(
    size: int,
    *,
    walls: frozenset[int],
    targets: frozenset[int],
    boxes: frozenset[int] | set[int],
    player: int,
) -> str:
    """Renders a board's glyphs, cell by cell."""
    glyphs = [_WALL if cell in walls else _FLOOR for cell in range(size * size)]
    for cell in targets:
        glyphs[cell] = _TARGET
    for cell in boxes:
        glyphs[cell] = _BOX_ON_TARGET if cell in targets else _BOX
    glyphs[player] = _PLAYER_ON_TARGET if player in targets else _PLAYER
    return "".join(glyphs)


def generate_puzzle(settings: SokobanEnvConfig, *, split: Split, seed: int) -> Puzzle:
    """Generates the puzzle of a seed, from the layouts of ``split``.

    Raises:
        ConfigError: no puzzle was found in 1,000 layouts; the message names the settings.
    """
    rng = random.Random(seed)
    for _ in range(_MAX_LAYOUTS):
        layout = _draw_layout(rng, settings)
        if layout is None:
            continue
        walls, targets = layout
        layers = _search_backwards(settings, walls, targets)
        first = settings.min_solution - 1
        if len(layers) <= first:
            continue
        for _ in range(_DRAWS_PER_LAYOUT):
            depth = first + _draw(rng, len(layers) - first)
            player, boxes = layers[depth][_draw(rng, len(layers[depth]))]
            puzzle = Puzzle(
                size=settings.size,
                walls=walls,
                targets=targets,
                boxes=_cells_of(boxes),
                player=player,
                optimal_length=depth + 1,
            )
            if is_in_split(puzzle.rows(), split, settings.held_out_fraction):
                return puzzle
    raise ConfigError(
        f"sokoban: {_MAX_LAYOUTS} random layouts gave no puzzle for size {settings.size}, num_boxes "
        f"{settings.num_boxes}, min_solution {settings.min_solution}, max_solution {settings.max_solution}, "
        f"held_out_fraction {settings.held_out_fraction} "
        f"(split '{split}'): set a larger size, fewer boxes, or another held_out_fraction"
    )


def _draw(rng: random.Random, count: int) -> int:
    """Draws a number of 0 to ``count`` - 1."""
    return int(rng.random() * count)


def _draw_layout(rng: random.Random, settings: SokobanEnvConfig) -> tuple[frozenset[int], frozenset[int]] | None:
    """Draws walls and targets; ``None`` where they leave no connected floor with room for boxes and player."""
    size = settings.size
    inside = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]
    cells = [cell for cell in inside if rng.random() >= _WALL_SHARE]
    if len(cells) <= settings.num_boxes or not _is_connected(set(cells), size):
        return None
    walls = frozenset(range(size * size)).difference(cells)
    for index in range(settings.num_boxes):  # a shuffle of as many as are needed
        other = index + _draw(rng, len(cells) - index)
        cells[index], cells[other] = cells[other], cells[index]
    return walls, frozenset(cells[: settings.num_boxes])


def _is_connected(floor: set[int], size: int) -> bool:
    reached, edge = set(), [min(floor)]
    while edge:
        cell = edge.pop()
        if cell in floor and cell not in reached:
            reached.add(cell)
            edge += [cell - size, cell + size, cell - 1, cell + 1]
    return len(reached) == len(floor)


def _search_backwards(
    settings: SokobanEnvConfig, walls: frozenset[int], targets: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """Finds states (player's cell, boxes as a bit mask) by depth, from depth 1 to at most ``max_solution``."""
    size = settings.size
    wall_mask, solved = _mask_of(walls), _mask_of(targets)
    layer = [(cell, solved) for cell in range(size * size) if cell not in walls and cell not in targets]
    known = set(layer)
    layers: list[list[tuple[int, int]]] = []
    while layer and len(layers) < settings.max_solution and len(known) < _MAX_STATES:
        layer = _states_before(layer, known, wall_mask, moves=(-size, size, -1, 1))
        if layer:
            layers.append(layer)
    return layers


def _states_before(
    layer: list[tuple[int, int]], known: set[tuple[int, int]], wall_mask: int, *, moves: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Finds unknown states from which one move leads to a state of ``layer``; they become known."""
    found = []
    for player, boxes in layer:
        blocked = wall_mask | boxes
        for move in moves:
            origin = player - move
            if blocked >> origin & 1:
                continue
            before = [(origin, boxes)]  # the move was a step onto free floor
            if boxes >> (player + move) & 1:  # or it pushed this box here from where the player is
                before.append((origin, boxes ^ (1 << player + move) | 1 << player))
            for state in before:
                if state not in known:
                    known.add(state)
                    found.append(state)
    return found


def _mask_of(cells: frozenset[int]) -> int:
    return sum(1 << cell for cell in cells)


def _cells_of(mask: int) -> frozenset[int]:
    return frozenset(cell for cell in range(mask.bit_length()) if mask >> cell & 1)


class SokobanEnv(GridEnv):
    """One Sokoban; every episode's puzzle follows from its seed.

    Raises ``ConfigError`` for a split without layouts.
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
        super().__init__(
            num_cells=len(self._shown_cells),
            glyphs=SOKOBAN.glyphs,
            num_actions=len(SOKOBAN.actions),
            max_steps=max_steps,
        )
        self._walls: frozenset[int] = frozenset()
        self._targets: frozenset[int] = frozenset()
        self._boxes: set[int] = set()
        self._player = 0

    @property
    def invalid_reward(self) -> float:
        """Returns the reward of a turn without a move, with the penalty."""
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
