"""The recorded step that mode mock replays for a step missing from the recording."""

from __future__ import annotations

import pytest

from mock_scheduler.proxy.routing import MissingStep, choose_recorded_step, request_stand_in
from mock_scheduler.scheduler import RolloutRequest


@pytest.mark.parametrize(
    ("step", "present", "missing_step", "chosen"),
    [
        (3, [1, 3], "repeat", 3),
        (3, [1, 3], "error", 3),
        (2, [1, 3], "error", 2),  # loading it raises
        (2, [1, 3], "repeat", 1),
        (9, [1, 3], "repeat", 3),
        (0, [1, 3], "repeat", 1),
        (2, [1, 3], "repeat_last", 3),
        (2, [], "repeat", 2),  # loading it raises
        (2, [], "repeat_last", 2),
    ],
)
def test_the_nearest_earlier_step_stands_in_or_the_last_one_or_none(
    step: int, present: list[int], missing_step: MissingStep, chosen: int
) -> None:
    assert choose_recorded_step(step, present, missing_step) == chosen


def test_a_stand_in_must_have_the_prompts_that_were_asked_for() -> None:
    request = RolloutRequest(global_step=2, batch_size=1, prompt_digests=("0" * 64,))
    assert request_stand_in(request, 1) == RolloutRequest(global_step=1, batch_size=1, prompt_digests=("0" * 64,))
