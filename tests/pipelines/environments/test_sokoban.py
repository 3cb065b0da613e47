"""Sokoban: puzzles by seed and their shortest solutions, the rules and every reward by hand, boards as tokens."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig, SokobanEnvConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import StepResult, TokenEnvironment
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import build_environment, build_tokenizer
from pipelines.environments.sokoban import Puzzle, SokobanEnv, generate_puzzle

ROOT = Path(__file__).parents[3]

UP, DOWN, LEFT, RIGHT = range(4)
FIRST_ACTION = 2
NO_ACTION = 4

State = tuple[int, frozenset[int]]


def settings_of(**values: object) -> SokobanEnvConfig:
    return SokobanEnvConfig(**{"size": 5, "num_boxes": 1, **values})


def puzzle_of(rows: list[str]) -> Puzzle:
    """A puzzle as it is drawn."""
    text = "".join(rows)
    cells = {glyph: {cell for cell, found in enumerate(text) if found == glyph} for glyph in "#O√XPS"}
    (player,) = cells["P"] | cells["S"]
    return Puzzle(
        size=len(rows),
        walls=frozenset(cells["#"]),
        targets=frozenset(cells["O"] | cells["√"] | cells["S"]),
        boxes=frozenset(cells["X"] | cells["√"]),
        player=player,
        optimal_length=0,
    )


def env_at(monkeypatch: pytest.MonkeyPatch, rows: list[str], *, max_steps: int = 20, **values: object) -> SokobanEnv:
    """An environment whose next episode starts on the drawn board."""
    puzzle = puzzle_of(rows)
    monkeypatch.setattr("pipelines.environments.sokoban.generate_puzzle", lambda *_args, **_options: puzzle)
    env = SokobanEnv(settings=settings_of(size=len(rows), **values), max_steps=max_steps)
    board, _ = env.reset(seed=0)
    assert board == "".join(rows)
    return env


def solve(puzzle: Puzzle) -> list[int] | None:
    """The shortest solution by a search forwards, which shares nothing with the generator's, backwards."""
    offsets = (-puzzle.size, puzzle.size, -1, 1)
    start: State = (puzzle.player, puzzle.boxes)
    came_from: dict[State, tuple[State, int] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state[1] == puzzle.targets:
            return path_to(state, came_from)
        for action, offset in enumerate(offsets):
            player, boxes = state[0] + offset, state[1]
            if player in boxes:
                if player + offset in boxes | puzzle.walls:
                    continue
                boxes = boxes - {player} | {player + offset}
            if player not in puzzle.walls and (player, boxes) not in came_from:
                came_from[(player, boxes)] = (state, action)
                queue.append((player, boxes))
    return None


def path_to(state: State, came_from: dict[State, tuple[State, int] | None]) -> list[int]:
    actions = []
    while (step := came_from[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]


# Regenerating: print(generate_puzzle(settings_of(...), split="all", seed=SEED).rows()).
@pytest.mark.parametrize(
    ("values", "seed", "rows", "optimal_length"),
    [
        ({}, 0, ["#####", "#___#", "#_XS#", "#___#", "#####"], 5),
        ({}, 1, ["#####", "##O_#", "#PX_#", "#__##", "#####"], 3),
        ({}, 2147483647, ["#####", "#OX_#", "#_#_#", "##P_#", "#####"], 4),
        ({"size": 6}, 7, ["######", "#____#", "#_#_O#", "###_X#", "##__P#", "######"], 1),
        (
            {"size": 6, "num_boxes": 2, "max_solution": 20},
            7,
            ["######", "#_OXP#", "#_#_√#", "###__#", "##___#", "######"],
            1,
        ),
    ],
)
def test_a_seeds_puzzle_is_known_cell_by_cell(
    values: dict[str, object], seed: int, rows: list[str], optimal_length: int
) -> None:
    puzzle = generate_puzzle(settings_of(**values), split="all", seed=seed)
    assert list(puzzle.rows()) == rows
    assert puzzle.optimal_length == optimal_length


@pytest.mark.parametrize(
    "values",
    [{}, {"size": 6}, {"num_boxes": 2}, {"num_boxes": 3, "size": 6, "max_solution": 6}, {"max_solution": 3}],
    ids=str,
)
def test_every_puzzle_is_solved_by_its_shortest_solution_and_not_at_its_start(values: dict[str, object]) -> None:
    """The moves of an independent search are played through the environment: the last one ends the episode."""
    settings = settings_of(**values)
    env = SokobanEnv(settings=settings, max_steps=100)
    lengths: Counter[int] = Counter()
    for seed in range(60):
        puzzle = generate_puzzle(settings, split="all", seed=seed)
        solution = solve(puzzle)
        assert solution is not None
        board, info = env.reset(seed=seed)
        assert board == "".join(puzzle.rows())
        assert info == {"optimal_length": len(solution)}
        assert len(puzzle.boxes) == len(puzzle.targets) == settings.num_boxes
        outcomes = [env.step(action) for action in solution]
        assert [outcome[2] for outcome in outcomes] == [False] * (len(solution) - 1) + [True]
        assert outcomes[-1][4] == {"is_valid": True, "is_success": True}
        lengths[len(solution)] += 1
    assert min(lengths) >= 1
    assert max(lengths) <= settings.max_solution
    assert len(lengths) >= min(3, settings.max_solution)


def test_three_thousand_seeds_give_more_than_half_of_the_smallest_boards_puzzles() -> None:
    """There are 2,104 on a connected floor (counted over all walls, targets and states), of lengths 1 to 10."""
    puzzles = [generate_puzzle(settings_of(), split="all", seed=seed) for seed in range(3000)]
    assert len({puzzle.rows() for puzzle in puzzles}) > 1200
    lengths = Counter(puzzle.optimal_length for puzzle in puzzles)
    assert sorted(lengths) == list(range(1, 11))
    assert max(lengths.values()) < 0.35 * len(puzzles)


def test_training_and_validation_share_no_puzzle_over_two_thousand_seeds() -> None:
    settings = settings_of(held_out_fraction=0.2)
    trained = {generate_puzzle(settings, split="train", seed=seed).rows() for seed in range(2000)}
    validated = {generate_puzzle(settings, split="held_out", seed=seed).rows() for seed in range(2000)}
    assert trained & validated == set()
    # 2,104 puzzles in all, a fifth of them held out; most of either part is found.
    assert 300 < len(validated) < 460
    assert 800 < len(trained) < 1700


def test_what_is_held_out_does_not_depend_on_whether_the_outer_wall_is_shown() -> None:
    shown, hidden = (settings_of(held_out_fraction=0.2, show_walls_around=is_shown) for is_shown in (True, False))
    for seed in range(50):
        assert generate_puzzle(shown, split="train", seed=seed) == generate_puzzle(hidden, split="train", seed=seed)


def test_puzzles_are_the_same_in_another_process_and_under_another_hash_seed() -> None:
    code = (
        "from pipelines.config.environments import SokobanEnvConfig as Config\n"
        "from pipelines.environments.sokoban import generate_puzzle\n"
        "print([generate_puzzle(Config(size=6, num_boxes=2), split='all', seed=seed).rows() for seed in range(20)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = [generate_puzzle(settings_of(size=6, num_boxes=2), split="all", seed=seed).rows() for seed in range(20)]
    assert outputs == [f"{here}\n"] * 2


def test_global_random_states_are_neither_read_nor_moved() -> None:
    random.seed(1)
    np.random.seed(1)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    first = generate_puzzle(settings_of(), split="all", seed=9)
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
    random.seed(2)
    assert generate_puzzle(settings_of(), split="all", seed=9) == first


def test_a_board_without_a_puzzle_is_refused_with_its_settings() -> None:
    """Player and box have 9 · 8 places within the walls of 5 × 5, so that no shortest solution takes 90 moves."""
    with pytest.raises(ConfigError) as caught:
        generate_puzzle(settings_of(min_solution=90, max_solution=99), split="all", seed=0)
    assert str(caught.value) == (
        "sokoban: 1000 random layouts gave no puzzle for size 5, num_boxes 1, min_solution 90, "
        "max_solution 99, held_out_fraction 0.0 "
        "(split 'all'): set a larger size, fewer boxes, or another held_out_fraction"
    )


PUSH_ONTO_TARGET = ["######", "#PXO_#", "#____#", "#__XO#", "#____#", "######"]


@pytest.mark.parametrize(
    ("action", "board"),
    [
        (RIGHT, "#######_P√_##____##__XO##____#######"),
        (DOWN, "#######_XO_##P___##__XO##____#######"),
        (UP, "".join(PUSH_ONTO_TARGET)),
        (LEFT, "".join(PUSH_ONTO_TARGET)),
        (NO_ACTION, "".join(PUSH_ONTO_TARGET)),
    ],
)
def test_a_move_walks_pushes_or_stays(monkeypatch: pytest.MonkeyPatch, action: int, board: str) -> None:
    env = env_at(monkeypatch, PUSH_ONTO_TARGET, num_boxes=2)
    assert env.step(action)[0] == board


@pytest.mark.parametrize(
    "rows",
    [
        ["#####", "#PX##", "#_O_#", "#___#", "#####"],
        ["######", "#PXX_#", "#_OO_#", "#____#", "#____#", "######"],
    ],
    ids=["against a wall", "against another box"],
)
def test_a_box_that_cannot_move_stops_the_player(monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> None:
    env = env_at(monkeypatch, rows)
    board, reward, terminated, truncated, info = env.step(RIGHT)
    assert board == "".join(rows)
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info == {"is_valid": True, "is_success": False}


def test_the_player_on_a_target_is_drawn_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    env = env_at(monkeypatch, ["#####", "#PO_#", "#_X_#", "#___#", "#####"])
    assert env.step(RIGHT)[0] == "######_S_##_X_##___######"
    assert env.step(RIGHT)[0] == "######_OP##_X_##___######"


# Two boxes, so that one on its target does not end the episode. In sparse reward only the end counts.
@pytest.mark.parametrize(
    ("rows", "action", "dense", "sparse", "is_solved"),
    [
        (["######", "#P___#", "#_XO_#", "#__XO#", "#____#", "######"], RIGHT, -0.1, 0.0, False),
        (PUSH_ONTO_TARGET, RIGHT, -0.1 + 1.0, 0.0, False),
        (["######", "#P√__#", "#____#", "#__XO#", "#____#", "######"], RIGHT, -0.1 - 1.0, 0.0, False),
        (["######", "#P√O_#", "#____#", "#__X_#", "#____#", "######"], RIGHT, -0.1, 0.0, False),
        (["######", "#PXO_#", "#____#", "#__√_#", "#____#", "######"], RIGHT, -0.1 + 1.0 + 10.0, 1.0, True),
        (["######", "#PXO_#", "#____#", "#__√_#", "#____#", "######"], NO_ACTION, -0.1 - 0.15, -0.15, False),
    ],
    ids=["walk", "onto a target", "off a target", "from target to target", "solved", "no action"],
)
def test_rewards_are_gym_sokobans(
    monkeypatch: pytest.MonkeyPatch, rows: list[str], action: int, dense: float, sparse: float, is_solved: bool
) -> None:
    _, reward, terminated, truncated, info = env_at(monkeypatch, rows, num_boxes=2).step(action)
    assert (reward, terminated, truncated, info["is_success"]) == (dense, is_solved, False, is_solved)
    assert env_at(monkeypatch, rows, num_boxes=2, sparse_reward=True).step(action)[1] == sparse


def test_the_configured_rewards_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"step_penalty": -1.0, "box_reward": 2.0, "solved_reward": 4.0, "format_penalty": -8.0}
    rows = ["#####", "#PXO#", "#___#", "#___#", "#####"]
    env = env_at(monkeypatch, rows, **values)
    assert env.step(NO_ACTION)[1] == -9.0
    assert env.step(RIGHT)[1] == -1.0 + 2.0 + 4.0


def test_the_turn_limit_truncates_unless_the_last_turn_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["#####", "#PXO#", "#___#", "#___#", "#####"]
    env = env_at(monkeypatch, rows, max_steps=2)
    assert [env.step(action)[2:4] for action in (NO_ACTION, UP)] == [(False, False), (False, True)]
    env = env_at(monkeypatch, rows, max_steps=2)
    assert [env.step(action)[2:4] for action in (NO_ACTION, RIGHT)] == [(False, False), (True, False)]


def make_environment(**values: object) -> tuple[TokenEnvironment, GridTokenizer]:
    config = CustomEnvConfig(env_type="sokoban", max_steps=20, env_config=settings_of(**values))
    tokenizer = build_tokenizer(PipelineConfig(exp_name="x", custom_envs={"FrozenLake": config}))
    return build_environment(config, tokenizer), tokenizer


def board_of(tokenizer: GridTokenizer, tokens: list[int]) -> str:
    return "".join(text.partition(":")[2] for text in tokenizer.decode(tokens))


@pytest.mark.parametrize("is_shown", [True, False])
def test_tokens_show_the_board_with_or_without_its_outer_wall(is_shown: bool) -> None:
    environment, tokenizer = make_environment(show_walls_around=is_shown)
    num_cells = 25 if is_shown else 9
    assert tokenizer.vocab_size == 2 + 4 + num_cells + 7 * num_cells
    for seed in range(10):
        rows = generate_puzzle(settings_of(), split="all", seed=seed).rows()
        shown = "".join(rows if is_shown else [row[1:-1] for row in rows[1:-1]])
        tokens = environment.reset(seed).observation
        assert tokens[0] == 1
        assert board_of(tokenizer, tokens[1:-1]) == shown
        player_cell = next(cell for cell, glyph in enumerate(shown) if glyph in "PS")
        assert tokenizer.decode(tokens[-1:]) == [f"<act@{player_cell}>"]


def test_every_layout_has_a_digest_of_its_own() -> None:
    environment, _ = make_environment()
    starts = [environment.reset(seed) for seed in range(200)]
    boards = {tuple(start.observation) for start in starts}
    assert len({start.layout_digest for start in starts}) == len(boards) > 150


@pytest.mark.parametrize("token", [0, 1, 6, 31, 100])
def test_a_token_that_is_no_action_is_a_turn_without_a_move(token: int) -> None:
    environment, _ = make_environment()
    prompt = environment.reset(0).observation
    assert environment.step([token]) == StepResult(
        observation=prompt[1:],
        reward=-0.1 - 0.15,
        terminated=False,
        truncated=False,
        is_valid=False,
        is_success=False,
    )


def test_a_solution_in_tokens_ends_in_success() -> None:
    environment, _ = make_environment(show_walls_around=False)
    start = environment.reset(3)
    solution = solve(generate_puzzle(settings_of(), split="all", seed=3))
    assert solution is not None
    results = [environment.step([FIRST_ACTION + action]) for action in solution]
    assert start.optimal_length == len(solution)
    assert [result.is_success for result in results] == [False] * (len(solution) - 1) + [True]
    assert results[-1].reward == -0.1 + 1.0 + 10.0
    assert results[-1].terminated
