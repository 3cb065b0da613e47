"""A recorded trajectory as a person reads it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.display.console import Console
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.report.recording.show import find_row, print_trajectory
from tests.batches import SAMPLING, make_row

WORDS = Vocabulary(texts=dict(enumerate(["<pad>", "<bos>", "wall", "free", "Left", "Right", "goal", "bump"])))


def make_batch(rows: Sequence[Trajectory]) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)


def make_episode() -> Trajectory:
    """Prompt of three, two tokens sampled, one answered, one sampled, one answered."""
    row = make_row(
        1,
        9,
        tokens=(1, 2, 3, 4, 5, 7, 4, 6),
        response=(False, False, False, True, True, False, True, False),
        rollout_logprobs=(-0.5, -1.0, -0.125),
        turn_rewards=(-0.1, 1.0),
        prompt_length=3,
    )
    return replace(row, policy_versions=torch.tensor([3, 4], dtype=torch.int32))


def show(row: Trajectory, *, vocabulary: Vocabulary | None = None, width: int = 80) -> str:
    text = io.StringIO()
    print_trajectory(
        make_batch([row]), 0, Console(file=text, width=width), where="dumps/v1: train step 0", vocabulary=vocabulary
    )
    return text.getvalue()


def test_prompt_responses_and_answers_are_told_apart_turn_by_turn() -> None:
    assert show(make_episode(), vocabulary=WORDS) == (
        "dumps/v1: train step 0, row 0 of 1\n"
        "default/group 1/episode 0/env 9/turn 0  FrozenLake\n"
        "terminated, reward 0.9, 2 turns, 8 tokens, 3 of them sampled\n"
        "\n"
        "prompt  3 tokens\n"
        "  <bos> wall free\n"
        "  1 2 3\n"
        "\n"
        "turn 0  2 tokens, logprob -1.5000 (mean -0.7500), reward -0.1, policy version 3\n"
        "  Left Right\n"
        "  4 5\n"
        "\n"
        "environment  1 token\n"
        "  bump\n"
        "  7\n"
        "\n"
        "turn 1  1 token, logprob -0.1250 (mean -0.1250), reward 1.0, policy version 4\n"
        "  Left\n"
        "  4\n"
        "\n"
        "environment  1 token\n"
        "  goal\n"
        "  6\n"
    )


def test_without_a_vocabulary_there_are_ids_only_and_long_ones_wrap() -> None:
    lines = show(
        make_row(tokens=range(100, 130), response=[False] * 28 + [True] * 2, turn_rewards=(1,)), width=60
    ).splitlines()
    assert lines[4:9] == [
        "prompt  2 tokens",
        "  100 101",
        "",
        "environment  26 tokens",
        "  102 103 104 105 106 107 108 109 110 111 112 113 114 115",
    ]
    assert max(map(len, lines)) <= 60


def test_turns_that_are_not_told_apart_in_the_tokens_are_listed() -> None:
    """Two turns whose tokens follow each other without an answer between."""
    assert show(make_row(turn_rewards=(0.0, 0.5, 1.0))) == (
        "dumps/v1: train step 0, row 0 of 1\n"
        "default/group 0/episode 0/env 0/turn 0  FrozenLake\n"
        "terminated, reward 1.5, 3 turns, 4 tokens, 2 of them sampled\n"
        "turns, not told apart in the tokens:\n"
        "  turn 0  reward 0.0, policy version 0\n"
        "  turn 1  reward 0.5, policy version 0\n"
        "  turn 2  reward 1.0, policy version 0\n"
        "\n"
        "prompt  2 tokens\n"
        "  1 2\n"
        "\n"
        "response  2 tokens, logprob -0.7500 (mean -0.3750)\n"
        "  3 4\n"
    )


def test_logprobs_that_a_frameworks_batch_lacks_are_not_shown_as_zeros() -> None:
    """A padded batch without logprobs is recorded with zeros, and says so in its meta: 0.0000 looked like certainty."""
    row = make_row(rollout_logprobs=(0.0, 0.0), turn_rewards=(1.0,))
    for absent, expected in (
        (["rewards", "rollout_logprobs"], "logprobs not recorded"),
        (["rewards"], "logprob 0.0000 (mean 0.0000)"),
    ):
        batch = RolloutBatch.from_trajectories(
            [row], sampling=SAMPLING, group_size=None, meta={"padded": {"absent": absent}}
        )
        text = io.StringIO()
        print_trajectory(batch, 0, Console(file=text, width=80), where="x", vocabulary=None)
        assert f"\nturn 0  2 tokens, {expected}, reward " in text.getvalue()


def test_no_line_ends_with_spaces_whatever_the_texts_are() -> None:
    lines = show(make_row(), vocabulary=Vocabulary(texts=dict.fromkeys(range(9), "a \n\n"))).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_an_empty_tag_leaves_nothing_behind() -> None:
    assert "\ndefault/group 0/episode 0/env 0/turn 0\n" in show(make_row(tag=""))


def test_extras_are_shown_with_dtype_and_values() -> None:
    extras = {
        "info": {"seed": 7},
        "router": Ragged(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)),
        "weight": torch.tensor(float("nan")),
        "wide": torch.arange(65),
    }
    shown = show(replace(make_row(), extras=extras), width=400).split("extras\n")[1]
    assert shown == (
        '  info  {"seed":7}\n'
        "  router  ragged int16 [2, 2]: 1 2 3 4\n"
        "  weight  float32 []: nan\n"
        f"  wide  int64 [65]: {' '.join(map(str, range(64)))} …\n"
    )


def test_markup_in_a_text_is_no_markup() -> None:
    vocabulary = Vocabulary(texts={0: "[bold]x[/bold]", 1: ":smile:"})
    assert "\n  [bold]x[/bold] :smile:\n" in show(make_row(tokens=(0, 1, 1, 1)), vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("row", "number"),
    [
        ("1", 1),
        ("-1", 1),
        ("-2", 0),
        ("default/group 0/episode 0/env 2/turn 0", 1),
        ("default/group 0/episode 0/env 2", 1),
        ("0", 0),
    ],
)
def test_a_row_is_found_by_number_or_identity(row: str, number: int) -> None:
    assert find_row(make_batch([make_row(0, 0), make_row(0, 2)]), row, where="train step 3") == number


@pytest.mark.parametrize("row", ["2", "-3", "- 1", "x", "default/group 0/episode 0/env 1/turn 0"])
def test_a_row_that_is_not_there_is_refused_with_those_that_are(row: str) -> None:
    with pytest.raises(RecordingError) as caught:
        find_row(make_batch([make_row(0, 0), make_row(0, 2)]), row, where="v1: train step 3")
    assert str(caught.value) == (
        f"row {row!r} is not in v1: train step 3; it holds rows 0 to 1, default/group 0/episode 0/env 0/turn 0 to "
        "default/group 0/episode 0/env 2/turn 0"
    )


def test_the_best_and_the_worst_row_are_the_first_with_that_reward() -> None:
    rewards = [(0.0,), (1.0,), (-2.0,), (1.0,), (-2.0,)]
    batch = make_batch([make_row(group, 0, turn_rewards=turns) for group, turns in enumerate(rewards)])
    assert (find_row(batch, "best", where="x"), find_row(batch, "worst", where="x")) == (1, 2)
