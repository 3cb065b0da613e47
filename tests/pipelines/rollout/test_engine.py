"""The engine: cached against uncached and against plain passes, its messages and places, and what the scheduler gives.

The real models play once, in a process of their own (``engine_worker``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import JsonColumn, TensorColumn
from mock_scheduler.recording.step.step_file import decode_step
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.process_of_rank import Runtime
from pipelines.rollout.cached_policy import FIRST_WORDS, ForwardPass, place_tokens
from tests.dist.conftest import launch
from tests.dist.workers.rollout_worker import MODELS, parse_layout, rollout_config
from tests.pipelines.workers.engine_worker import ARGS, CASES

ROUNDING = {"": 1e-6, " float64": 1e-12}
"""Logits of a few units, summed in another order."""

ACTIONS = range(2, 6)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the worker has written."""
    folder = tmp_path_factory.mktemp("engine")
    launch(1, folder, (), module="tests.pipelines.workers.engine_worker")
    return folder


def facts(folder: Path, case: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{case}.json").read_text(encoding="utf-8"))
    return content


def rows(folder: Path, case: str) -> RolloutBatch:
    return decode_step((folder / f"{case}.safetensors").read_bytes())[0]


def turns_of(batch: RolloutBatch) -> list[list[int]]:
    """The sampled tokens of each turn: each unbroken run of the response mask."""
    turns: list[list[int]] = []
    for row in batch.rows():
        mask = row.response_mask.tolist()
        for position, token in enumerate(row.tokens.tolist()):
            if mask[position]:
                turns += [] if position > 0 and mask[position - 1] else [[]]
                turns[-1].append(token)
    return turns


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("model", ["rope", "learned"])
def test_a_cache_changes_no_token_and_no_logprob_beyond_rounding(played: Path, model: str, precision: str) -> None:
    cached, uncached = f"{model} cached{precision}", f"{model} uncached{precision}"
    assert torch.equal(rows(played, cached).tokens, rows(played, uncached).tokens)
    found, expected = facts(played, cached)["logprobs"], facts(played, uncached)["logprobs"]
    assert len(found) == int(rows(played, cached).response_mask.sum())
    assert found == pytest.approx(expected, rel=0, abs=ROUNDING[precision])


@pytest.mark.parametrize("precision", ROUNDING)
def test_rows_of_different_lengths_are_drawn_as_each_alone_by_a_plain_pass(played: Path, precision: str) -> None:
    """Eleven draws with each of two ways to sample, plain and cut by top-k and top-p; rows end and grow."""
    content = facts(played, f"rows{precision}")
    assert len(content["found"]) == 11 * len(ARGS)
    assert [token for token, _ in content["found"]] == [token for token, _ in content["expected"]]
    found, expected = ([logprob for _, logprob in content[key]] for key in ("found", "expected"))
    assert found == pytest.approx(expected, rel=0, abs=ROUNDING[precision])


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_computes_the_same_logprobs(played: Path, case: str) -> None:
    """Both are rounded to float32, whose unit is 4.8e-7 for the largest of them, about -5."""
    assert facts(played, case)["trainer"] <= 1.5e-6


def test_how_many_rows_share_a_pass_changes_no_token(played: Path) -> None:
    blocks_of_four, one_block = rows(played, "rope cached"), rows(played, "one block")
    assert torch.equal(blocks_of_four.tokens, one_block.tokens)
    assert torch.allclose(blocks_of_four.rollout_logprobs, one_block.rollout_logprobs, rtol=0, atol=2e-6)


def test_environments_in_processes_of_their_own_play_the_same_bits(played: Path) -> None:
    assert rows(played, "environment workers").digest() == rows(played, "rope cached").digest()


@pytest.mark.parametrize(("case", "environments"), [("rope cached", 4), ("one block", 12), ("environment workers", 4)])
def test_environments_are_built_once_per_row_of_a_block(played: Path, case: str, environments: int) -> None:
    built = facts(played, case)["ledger"]
    assert (built["engine"], built["environment"]) == (1, environments)


@pytest.mark.parametrize("case", ["rope cached", "turns", "short"])
def test_a_turn_ends_with_its_first_action_token(played: Path, case: str) -> None:
    limit = 30 if case == "short" else 2
    turns = turns_of(rows(played, case))
    assert any(len(turn) > 1 for turn in turns)
    assert all(len(turn) <= limit for turn in turns)
    assert not any(token in ACTIONS for turn in turns for token in turn[:-1])
    assert any(turn[-1] in ACTIONS for turn in turns)


def test_a_policy_of_actions_alone_samples_one_token_per_turn(played: Path) -> None:
    batch = rows(played, "actions only")
    assert all(len(turn) == 1 and turn[0] in ACTIONS for turn in turns_of(batch))
    invalid = batch.extras["num_invalid_actions"]
    assert isinstance(invalid, TensorColumn)
    assert invalid.values.tolist() == [0] * 12


def test_turns_that_the_sequence_cuts_are_truncated(played: Path) -> None:
    """A first prompt of 18 tokens leaves 22 for a turn of up to 30."""
    batch = rows(played, "short")
    assert int(batch.lengths.max()) == 40
    cut = batch.lengths == 40
    assert set(batch.terminations[cut].tolist()) <= {int(Termination.TRUNCATED), int(Termination.TERMINATED)}
    assert int(Termination.TRUNCATED) in batch.terminations[cut].tolist()


def test_a_row_per_turn_says_what_the_trajectory_says(played: Path) -> None:
    whole, turns = rows(played, "rope cached"), rows(played, "turns")
    assert (turns.num_trajectories, turns.group_size) == (12, 3)
    assert len(turns) == len(whole.turn_rewards)
    assert torch.equal(turns.turn_rewards, whole.turn_rewards)
    assert torch.equal(turns.rollout_logprobs, whole.rollout_logprobs)
    assert turns_of(turns) == turns_of(whole)
    last_rows = {row.identity.trajectory_key: row for row in turns.rows()}
    for row in whole.rows():
        assert torch.equal(last_rows[row.identity.trajectory_key].tokens, row.tokens)


def test_rows_say_how_their_episodes_went(played: Path) -> None:
    batch = rows(played, "rope cached")
    kinds = {
        name: column.values.dtype if isinstance(column, TensorColumn) else type(column.row(0))
        for name, column in batch.extras.items()
    }
    assert kinds == {
        "layout_digest": str,
        "num_invalid_actions": torch.int32,
        "optimal_length": torch.int32,
        "success": torch.bool,
    }
    boards = batch.extras["layout_digest"]
    assert isinstance(boards, JsonColumn)
    assert [len(set(boards.items[start : start + 3])) for start in range(0, 12, 3)] == [1, 1, 1, 1]  # groups share one
    expected = [sum(turn[-1] not in ACTIONS for turn in turns_of(batch.select([index]))) for index in range(len(batch))]
    invalid = batch.extras["num_invalid_actions"]
    assert isinstance(invalid, TensorColumn)
    assert invalid.values.tolist() == expected


def test_policy_versions_are_those_of_the_request(played: Path) -> None:
    assert set(rows(played, "rope cached").policy_versions.tolist()) == {3}


def test_metrics_count_tokens_passes_and_seconds(played: Path) -> None:
    metrics = facts(played, "one block")["metrics"]
    batch = rows(played, "one block")
    assert set(metrics) == {
        "rollout/seconds",
        "rollout/sampled_tokens",
        "rollout/tokens_per_second",
        "rollout/forward_passes",
        "rollout/environment_seconds",
    }
    assert metrics["rollout/sampled_tokens"] == float(batch.response_mask.sum())
    # Every pass gives each running episode one token, so one block needs as many as its longest episode has.
    assert metrics["rollout/forward_passes"] == float(batch.response_lengths.max())
    assert metrics["rollout/tokens_per_second"] == pytest.approx(
        metrics["rollout/sampled_tokens"] / metrics["rollout/seconds"]
    )
    assert 0.0 < metrics["rollout/environment_seconds"] < metrics["rollout/seconds"]


def test_validation_plays_the_same_held_out_episodes_every_time(played: Path) -> None:
    content = facts(played, "validation")
    first, second = content["digests"]
    assert first == second
    assert not set(content["layouts"]["val"]) & set(content["layouts"]["train"])
    assert content["sampling"] == [2, "processed"]
    assert content["train_episodes"] == [1]


def test_the_model_evaluates_while_it_generates_and_trains_after_even_behind_an_error(played: Path) -> None:
    assert facts(played, "error") == {"during": [False, False], "after": [True, True]}
    assert all(facts(played, case)["is_training"] for case in CASES)


PASS = ForwardPass(kept=[0, 2], starts=[4, 7], tokens=[[11], [12, 13, 14]], uniforms=[0.1, 1.0 - 2.0**-53])


@pytest.mark.parametrize(
    "item",
    [
        PASS,
        ForwardPass(kept=None, starts=[0], tokens=[[5]], uniforms=[0.0]),
        ForwardPass(kept=None, starts=[0, 0], tokens=[[1] * FIRST_WORDS, [2]], uniforms=[0.25, 0.5]),
    ],
    ids=["continued", "new", "longer than the first message"],
)
def test_a_pass_comes_back_from_its_words(item: ForwardPass) -> None:
    assert ForwardPass.decode(item.encode()) == item


def test_the_words_of_a_pass_are_as_documented() -> None:
    words = PASS.encode().tolist()
    assert words[:10] == [1, 2, 1, 4, 0, 2, 4, 7, 1, 3]
    assert words[12:] == [11, 12, 13, 14]


def test_new_tokens_are_placed_behind_what_their_rows_have_read() -> None:
    """Padding goes to the slot behind all rows' tokens, where no query looks."""
    places = place_tokens([4, 0], [1, 3], multiple_of=1)
    assert places.is_token.tolist() == [[True, False, False], [True, True, True]]
    assert places.positions.tolist() == [[4, 4, 4], [0, 1, 2]]
    assert places.slots.slots.tolist() == [[4, 0], [5, 1], [5, 2]]
    assert (places.slots.end, places.last.tolist()) == (6, [0, 2])


def test_rows_without_padding_need_no_slot_for_it() -> None:
    places = place_tokens([4, 2], [1, 1], multiple_of=1)
    assert (places.slots.slots.tolist(), places.slots.end) == ([[4, 2]], 5)


def test_columns_are_as_many_as_sequence_parallelism_can_split() -> None:
    places = place_tokens([0], [3], multiple_of=4)
    assert places.is_token.tolist() == [[True, True, True, False]]
    assert places.slots.slots.tolist() == [[0], [1], [2], [3]]


ONE = Runtime(
    global_rank=0, world_size=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0, dp_size=1,
    device=torch.device("cpu"),
)  # fmt: skip


def test_actions_are_the_tokens_that_these_tests_take_for_such() -> None:
    assert build_tokenizer(rollout_config(MODELS["rope"], parse_layout("tp1"))).action_ids == list(ACTIONS)
