"""Recorded actions played again: hand-written rows on the fixed map, every planted difference, steps and exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from mock_scheduler import cli
from mock_scheduler.batch import RolloutBatch, SampleIdentity, Termination, Trajectory
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.writing.opening import open_recording
from mock_scheduler.scheduler import Mode, RolloutRequest
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.environments.seeds import derive_seed, derive_uniform
from pipelines.environments.workers import EnvironmentPool
from pipelines.replay_actions import compare_recording, main
from pipelines.rollout.episodes import RolloutForm, episode_rows, play_block
from pipelines.rollout.plan import plan_episodes
from pipelines.rollout.turns import TokenwiseTurns, TurnRules
from tests.batches import SAMPLING
from tests.programs import run_program

ROOT = Path(__file__).parents[2]

LEFT, DOWN, RIGHT, UP = 2, 3, 4, 5
NO_ACTION = 50
GLYPHS = "P_OGX√"
TERMINATED, TRUNCATED, ABORTED = Termination

CONFIG = """\
exp_name: replay
seed: 5
sequence_length: 128
training: {sequence_multiple_of: 1}
custom_envs:
  FrozenLake:
    max_steps: 6
    env_config: {map_name: 4x4, format_penalty: -0.5}
"""


def show(board: str) -> list[int]:
    """The tokens of a 4 × 4 board: sixteen cells from id 22, six glyphs each, then the query of the player's cell."""
    player = next(cell for cell, glyph in enumerate(board) if glyph in "PX√")
    return [*(22 + 6 * cell + GLYPHS.index(glyph) for cell, glyph in enumerate(board)), 6 + player]


START = show("P____O_O___OO__G")
AT_1 = show("_P___O_O___OO__G")
AT_4 = show("____PO_O___OO__G")
AT_8 = show("_____O_OP__OO__G")
AT_9 = show("_____O_O_P_OO__G")
AT_13 = show("_____O_O___OOP_G")
AT_14 = show("_____O_O___OO_PG")

Turn = tuple[list[int], float, list[int]]
"""What was sampled, its reward, and what the environment answered (nothing where the row ends)."""

INTO_THE_HOLE: list[Turn] = [([RIGHT], 0.0, AT_1), ([DOWN], 0.0, [])]
TO_THE_GOAL: list[Turn] = [
    ([DOWN], 0.0, AT_4),
    ([DOWN], 0.0, AT_8),
    ([RIGHT], 0.0, AT_9),
    ([DOWN], 0.0, AT_13),
    ([RIGHT], 0.0, AT_14),
    ([RIGHT], 1.0, []),
]
# The last token of a turn is its action: 50 and then Down is Down, and 50 alone is none.
INVALID: list[Turn] = [
    ([NO_ACTION, DOWN], 0.0, AT_4),
    ([NO_ACTION, NO_ACTION], -0.5, AT_4),
    ([UP], 0.0, START),
    ([LEFT], 0.0, START),
    ([LEFT], 0.0, START),
    ([LEFT], 0.0, []),
]


def identity(env_id: int, *, group_id: int = 0, turn: int = 0) -> SampleIdentity:
    return SampleIdentity(scheduler_id="default", group_id=group_id, episode_id=0, env_id=env_id, turn=turn)


def make_row(
    who: SampleIdentity,
    history: Sequence[int],
    turns: Sequence[Turn],
    termination: Termination,
    *,
    tag: str = "FrozenLake",
) -> Trajectory:
    tokens, mask = list(history), [False] * len(history)
    for sampled, _, observation in turns:
        tokens += [*sampled, *observation]
        mask += [True] * len(sampled) + [False] * len(observation)
    return Trajectory(
        identity=who,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.full((sum(mask),), -1.0),
        turn_rewards=torch.tensor([reward for _, reward, _ in turns], dtype=torch.float32),
        policy_versions=torch.zeros(len(turns), dtype=torch.int32),
        termination=termination,
        prompt_length=len(history),
        tag=tag,
    )


def whole_rows() -> list[Trajectory]:
    """Four trajectories: a hole, the goal, invalid turns up to the turn limit, and one that its engine aborted."""
    return [
        make_row(identity(0), [1, *START], INTO_THE_HOLE, TERMINATED),
        make_row(identity(1), [1, *START], TO_THE_GOAL, TERMINATED),
        make_row(identity(2), [1, *START], INVALID, TRUNCATED),
        make_row(identity(3), [1, *START], TO_THE_GOAL[:2], ABORTED),
    ]


def rows_by_turn(turns: Sequence[Turn], termination: Termination) -> list[Trajectory]:
    """One row per turn, with the whole history and only its own turn marked."""
    rows, history = [], [1, *START]
    for number, (sampled, reward, observation) in enumerate(turns):
        rows.append(make_row(identity(0, turn=number), history, [(sampled, reward, [])], termination))
        history = [*history, *sampled, *observation]
    return rows


def write_config(folder: Path, text: str = CONFIG) -> PipelineConfig:
    (folder / "replay.yaml").write_text(text, encoding="utf-8")
    return load_config("replay", config_path=folder)


def record(
    folder: Path,
    steps: dict[tuple[Mode, int], Sequence[Trajectory]],
    *,
    config: PipelineConfig,
    contract: Contract | None = None,
) -> str:
    """A recording of these rows, written as a run writes one."""
    digest = build_tokenizer(config).digest()
    dump_dir = str(folder / "recording")
    writer = open_recording(
        dump_dir,
        contract=contract or Contract.of({"vocabulary": digest, "seed": config.seed}),
        plan=(),
        provenance={},
        resume=False,
    )
    for (mode, step), rows in steps.items():
        batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
        info = StepInfo(step=step, mode=mode, scheduler_id="default", run_id=writer.run_id, policy_version=0)
        writer.write_step(batch, info)
    writer.close()
    return dump_dir


def test_rows_that_the_environments_give_again_are_equal(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    dump_dir = record(
        tmp_path, {("train", 0): whole_rows(), ("train", 3): whole_rows()[:2], ("val", 0): whole_rows()}, config=config
    )
    comparison = compare_recording(config, dump_dir, None)
    assert (comparison.exit_code, comparison.first) == (0, None)
    # Turns: 2 + 6 + 6 + 2. Tokens of the environment: a prompt of 18 and 17 for each answer that was recorded.
    assert comparison.num_rows == comparison.num_trajectories == 10
    assert comparison.num_turns == 16 + 8 + 16
    tokens = [18 + 17, 18 + 5 * 17, 18 + 5 * 17, 18 + 2 * 17]
    assert comparison.num_tokens == 2 * sum(tokens) + sum(tokens[:2])
    assert comparison.steps == "train 0, 3; val 0"


def test_rows_of_single_turns_are_equal_with_the_same_counts(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): rows_by_turn(INVALID, TRUNCATED)}, config=config)
    comparison = compare_recording(config, dump_dir, None)
    assert comparison.exit_code == 0
    assert (comparison.num_rows, comparison.num_trajectories) == (6, 1)
    assert (comparison.num_turns, comparison.num_tokens) == (6, 18 + 5 * 17)


def with_token(row: Trajectory, position: int, token: int) -> Trajectory:
    tokens = row.tokens.clone()
    tokens[position] = token
    return replace(row, tokens=tokens)


def with_reward(row: Trajectory, turn: int, reward: float) -> Trajectory:
    rewards = row.turn_rewards.clone()
    rewards[turn] = reward
    return replace(row, turn_rewards=rewards)


HOLE, GOAL, LIMIT, CUT = range(4)


# A row has its prompt at tokens 0 to 17, the first action at 18 and the first answer at 19 to 35.
@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (HOLE, lambda row: with_token(row, 3, 36), "prompt at token 3: recorded '2:O', replayed '2:_'"),
        (HOLE, lambda row: with_token(row, 17, 7), "prompt at token 17: recorded '<act@1>', replayed '<act@0>'"),
        (
            GOAL,
            lambda row: with_token(row, 19 + 2 * 18, 27),
            "observation of turn 2 at token 55: recorded '0:√', replayed '0:_'",
        ),
        (
            HOLE,
            lambda row: with_token(row, 19, 200),
            "observation of turn 0 at token 19: recorded token 200, which the vocabulary does not have, replayed '0:_'",
        ),
        (
            HOLE,
            lambda row: with_token(row, 18, LEFT),
            "observation of turn 0 at token 19: recorded '0:_', replayed '0:P'",
        ),
        (
            HOLE,
            lambda row: make_row(row.identity, [1, *START], [([RIGHT], 0.0, AT_1[:-1]), ([DOWN], 0.0, [])], TERMINATED),
            "observation of turn 0 at token 35: recorded a sampled token, replayed '<act@1>'",
        ),
        (
            CUT,
            lambda row: make_row(row.identity, [1, *START], [([DOWN], 0.0, [*AT_4, 30])], ABORTED),
            "observation of turn 0 at token 36: recorded '1:O', replayed nothing",
        ),
        (GOAL, lambda row: with_reward(row, 5, 0.5), "reward of turn 5: recorded 0.5, replayed 1.0"),
        (LIMIT, lambda row: with_reward(row, 1, 0.0), "reward of turn 1: recorded 0.0, replayed -0.5"),
        (
            HOLE,
            lambda row: replace(row, termination=TRUNCATED),
            "termination of turn 1: recorded truncated, replayed terminated",
        ),
        (
            LIMIT,
            lambda row: replace(row, termination=TERMINATED),
            "termination of turn 5: recorded terminated, replayed truncated",
        ),
        (
            HOLE,
            lambda row: replace(row, termination=ABORTED),
            "termination of turn 1: recorded aborted, replayed terminated",
        ),
        (
            CUT,
            lambda row: replace(row, termination=TRUNCATED),
            "termination of turn 1: recorded truncated, replayed that it goes on",
        ),
        (
            HOLE,
            lambda row: make_row(
                row.identity,
                [1, *START],
                [*INTO_THE_HOLE[:1], ([DOWN], 0.0, show("_____X_O___OO__G")), ([DOWN], 0.0, [])],
                TERMINATED,
            ),
            "termination of turn 1: recorded another turn, replayed terminated",
        ),
        (
            HOLE,
            lambda row: replace(
                row, turn_rewards=row.turn_rewards[:1], policy_versions=row.policy_versions[:1], reward=0.0
            ),
            "turns: recorded 1 reward, replayed 2 turns in its tokens",
        ),
    ],
)
def test_a_planted_difference_is_named(tmp_path: Path, number: int, change: object, message: str) -> None:
    config = write_config(tmp_path)
    rows = whole_rows()
    rows[number] = change(rows[number])
    dump_dir = record(tmp_path, {("train", 0): whole_rows(), ("train", 1): rows}, config=config)
    comparison = compare_recording(config, dump_dir, None)
    assert (comparison.exit_code, comparison.num_different, comparison.num_trajectories) == (1, 1, 8)
    place, difference = comparison.first
    assert f"{place}, {difference.describe()}" == (
        f"train step 1, default/group 0/episode 0/env {number}/turn 0: {message}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: [rows[0], *rows[2:]],
            "turn 2: turns: recorded turn 2, replayed that turn 1 comes next",
        ),
        (
            lambda rows: [*rows[:2], with_token(rows[2], 19, 27), *rows[3:]],
            "turn 2: observation of turn 0 at token 19: recorded '0:√', replayed '0:_'",
        ),
        (
            lambda rows: [*rows[:5], with_reward(rows[5], 0, 0.0)],
            "turn 5: reward of turn 5: recorded 0.0, replayed 1.0",
        ),
        (
            lambda rows: rows[:5],
            "turn 4: termination of turn 4: recorded terminated, replayed that it goes on",
        ),
    ],
)
def test_a_planted_difference_in_a_row_of_one_turn_is_named(tmp_path: Path, change: object, message: str) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): change(rows_by_turn(TO_THE_GOAL, TERMINATED))}, config=config)
    comparison = compare_recording(config, dump_dir, None)
    assert comparison.exit_code == 1
    assert comparison.first[1].describe() == f"default/group 0/episode 0/env 0/{message}"


@pytest.mark.parametrize("sequence_length", [36, 35])
def test_a_row_without_room_for_another_action_is_rightly_truncated(tmp_path: Path, sequence_length: int) -> None:
    """After a prompt of 18 tokens, one action and its answer there are 36, and an action needs one more."""
    config = write_config(tmp_path, CONFIG.replace("128", str(sequence_length)))
    row = make_row(identity(0), [1, *START], [([DOWN], 0.0, [])], TRUNCATED)
    dump_dir = record(tmp_path, {("train", 0): [row]}, config=config)
    assert compare_recording(config, dump_dir, None).exit_code == 0
    roomy = write_config(tmp_path, CONFIG.replace("128", "37"))
    assert compare_recording(roomy, dump_dir, None).exit_code == 1


def random_row(config: PipelineConfig, mode: Mode, group_id: int) -> Trajectory:
    """The first prompt of an episode on a random map, made from gymnasium's own map of the episode's seed."""
    seed = derive_seed(config.seed, "environment", "FrozenLake", mode, "default", group_id, 0)
    letters = "".join(generate_random_map(4, 0.8, seed=seed)).replace("S", "P", 1)
    prompt = [1, *show(letters.translate(str.maketrans({"F": "_", "H": "O"})))]
    return make_row(identity(0, group_id=group_id), prompt, [], ABORTED)


def test_episodes_are_those_of_their_seed_mode_and_group(tmp_path: Path) -> None:
    config = write_config(tmp_path, CONFIG.replace("map_name: 4x4", "map_name: null"))
    steps = {(mode, 0): [random_row(config, mode, group_id) for group_id in range(6)] for mode in ("train", "val")}
    dump_dir = record(tmp_path, steps, config=config)
    assert compare_recording(config, dump_dir, None).exit_code == 0
    other = write_config(tmp_path, CONFIG.replace("map_name: 4x4", "map_name: null").replace("seed: 5", "seed: 6"))
    comparison = compare_recording(other, dump_dir, None)
    assert (comparison.exit_code, comparison.first[1].kind) == (1, "prompt")
    assert comparison.changed_settings == ("seed: recorded 5, configured 6",)
    assert "\nsetting      seed: recorded 5, configured 6\n" in comparison.describe()


def test_another_vocabulary_is_refused_with_both_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): whole_rows()}, config=config)
    small = write_config(tmp_path, CONFIG.replace("map_name: 4x4", "map_name: null, size: 3"))
    assert main(["--config-path", str(tmp_path), "--config-name", "replay", "--recording", dump_dir]) == 3
    assert capsys.readouterr().err == (
        f"error: {dump_dir} was recorded with the vocabulary {build_tokenizer(config).digest()}, and the "
        f"configuration's is {build_tokenizer(small).digest()} (69 tokens): use the environments of the recording\n"
    )


def test_a_recording_of_another_pipeline_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): whole_rows()}, config=config, contract=Contract.of({"seed": 1}))
    assert main(["--config-path", str(tmp_path), "--config-name", "replay", "--recording", dump_dir]) == 3
    assert capsys.readouterr().err == (
        f"error: {dump_dir}: its contract names no vocabulary, so that its tokens cannot be read as those of these "
        "environments: it was not recorded by this pipeline\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "x"], "--steps: "),
        (["--recording", "{folder}/absent"], "absent"),
        (["--config-name", "absent"], "no configuration 'absent'"),
        (["--stepz", "1"], "No such option: --stepz (Possible options: --help, --steps)"),
        (["seed=-1"], "seed"),
    ],
)
def test_bad_input_exits_with_five(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): whole_rows()}, config=config)
    given = ["--config-path", str(tmp_path), "--config-name", "replay", "--recording", dump_dir]
    assert main([*given, *(text.format(folder=tmp_path) for text in arguments)]) == 5
    assert message in capsys.readouterr().err


def test_a_tag_that_is_not_configured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    row = make_row(identity(0), [1, *START], INTO_THE_HOLE, TERMINATED, tag="Lake")
    dump_dir = record(tmp_path, {("train", 0): [row]}, config=config)
    assert main(["--config-path", str(tmp_path), "--config-name", "replay", "--recording", dump_dir]) == 5
    assert capsys.readouterr().err == (
        f"error: {dump_dir}: train step 0 holds rows of the tag 'Lake', which is not in custom_envs ['FrozenLake']: "
        "use the configuration of the recording\n"
    )


def test_steps_that_are_not_there_are_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): whole_rows(), ("train", 1): whole_rows()}, config=config)
    given = ["--config-path", str(tmp_path), "--config-name", "replay", "--recording", dump_dir]
    assert main([*given, "--steps", "1"]) == 0
    assert "compared     4 rows, 16 turns, 293 tokens of the environments\n" in capsys.readouterr().out
    assert main([*given, "--steps", "7-"]) == 3
    assert capsys.readouterr().out == (
        f"recording    {dump_dir}\n"
        "steps        none\n"
        "compared     0 rows, 0 turns, 0 tokens of the environments\n"
        "verdict      nothing was compared: no row is in these steps; steps present: train 0-1\n"
    )


def test_the_command_line_passes_verdict_and_json_on(tmp_path: Path) -> None:
    """Through the real command line, with an override that makes the recorded penalty another one."""
    config = write_config(tmp_path)
    dump_dir = record(tmp_path, {("train", 0): whole_rows()}, config=config)
    command = ["replay-actions", "replay", dump_dir]
    options = ["--config-path", str(tmp_path), "--steps", "0-4", "--json", str(tmp_path / "result.json")]
    penalty = "custom_envs.FrozenLake.env_config.format_penalty=-0.25"
    done = run_program("mock_scheduler.cli", [*command, penalty, *options])
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[3:5] == [
        "different    1 of 4 trajectories",
        "first        train step 0, default/group 0/episode 0/env 2/turn 0: reward of turn 1: recorded -0.5, "
        "replayed -0.25",
    ]
    assert done.stdout.splitlines()[-1] == "verdict      different"
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["exit_code"] == 1
    assert result["first"] == {
        "mode": "train",
        "scheduler_id": "default",
        "step": 0,
        "row": "default/group 0/episode 0/env 2/turn 0",
        "kind": "reward",
        "turn": 1,
        "position": None,
        "recorded": "-0.5",
        "replayed": "-0.25",
    }


def test_an_entry_that_cannot_run_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends such a module with 1, which means that something differs."""
    write_config(tmp_path)
    monkeypatch.chdir(ROOT)
    arguments = ["replay-actions", "replay", "x", "--config-path", str(tmp_path), "--entry", "no.such.module"]
    assert cli.main(arguments) == 5


PLAYED = """\
exp_name: replay
sequence_length: {sequence_length}
rollout_batch_size: 32
val_batch_size: 32
actor_infer: {{max_new_tokens: 3}}
train_env_manager: {{num_env_groups: 8, group_size: 4, tags: [Train, Other]}}
val_env_manager: {{num_env_groups: 8, group_size: 4, tags: [Train, Other]}}
training: {{micro_batch_size: 4, global_batch_size: 16, sequence_multiple_of: 1}}
custom_envs:
  Train: {{env_type: {env_type}, max_steps: 5, env_config: {{{env_config}}}}}
  Other: {{env_type: {env_type}, max_steps: 3, env_config: {{{env_config}}}}}
"""


def played_rows(config: PipelineConfig, mode: Mode, form: RolloutForm) -> list[Trajectory]:
    """What the rollout makes of a policy that draws tokens by chance, one in three of which is no action."""
    tokenizer = build_tokenizer(config)
    request = RolloutRequest(global_step=1, batch_size=32, mode=mode, policy_version=1)
    rules = TurnRules(
        ends_turn=tokenizer.ends_turn,
        max_new_tokens=config.actor_infer.max_new_tokens,
        sequence_length=config.sequence_length,
    )

    def sample(
        _rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        return [int(uniform * 6) + 2 for uniform in uniforms], [-1.0] * len(histories)

    def uniform(who: SampleIdentity, turn: int, token_index: int) -> float:
        return derive_uniform(0, str(who), turn, token_index)

    pool = EnvironmentPool(config.custom_envs, tokenizer, num_workers=0)
    episodes = play_block(plan_episodes(config, request), pool, TokenwiseTurns(sample, uniform, rules), rules=rules)
    pool.close()
    return [row for episode in episodes for row in episode_rows(episode, form, policy_version=1)]


@pytest.mark.parametrize("form", ["trajectory", "step"])
@pytest.mark.parametrize(
    ("env_type", "env_config", "sequence_length"),
    [
        ("frozen_lake", "map_name: null, is_slippery: true, held_out_fraction: 0.3", 128),
        ("frozen_lake", "map_name: null, held_out_fraction: 0.3", 54),
        ("sokoban", "size: 5, show_walls_around: false, held_out_fraction: 0.3", 64),
    ],
)
def test_what_the_rollout_played_is_equal(
    tmp_path: Path, env_type: str, env_config: str, sequence_length: int, form: RolloutForm
) -> None:
    text = PLAYED.format(env_type=env_type, env_config=env_config, sequence_length=sequence_length)
    config = write_config(tmp_path, text)
    steps = {(mode, 1): played_rows(config, mode, form) for mode in ("train", "val")}
    dump_dir = record(tmp_path, steps, config=config)
    comparison = compare_recording(config, dump_dir, None)
    assert comparison.first is None
    assert comparison.num_trajectories == 64
    assert comparison.num_turns > 100
    all_maps = write_config(tmp_path, text.replace("held_out_fraction: 0.3", "held_out_fraction: 0.0"))
    assert 0 < compare_recording(all_maps, dump_dir, None).num_different < 64
