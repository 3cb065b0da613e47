"""Waiting for other processes, by a clock that the test turns."""

import pytest

from mock_scheduler.recording.writing.sharded import Patience


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


def never() -> str:
    raise AssertionError("nothing was to be said")


def test_what_holds_already_is_not_waited_for() -> None:
    time = FakeTime()
    assert Patience(timeout_s=0, clock=lambda: time.now_s, sleep=time.sleep).wait_until(lambda: True, describe=never)
    assert time.pauses == []


def test_pauses_grow_to_a_second_until_it_holds() -> None:
    time = FakeTime()
    assert Patience(clock=lambda: time.now_s, sleep=time.sleep).wait_until(
        lambda: len(time.pauses) == 8, describe=never
    )
    assert time.pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0])


def test_it_is_given_up_when_the_time_is_over_and_looked_at_once_more() -> None:
    time, looked_s = FakeTime(), []

    def look() -> bool:
        looked_s.append(time.now_s)
        return False

    assert not Patience(timeout_s=0.1, clock=lambda: time.now_s, sleep=time.sleep).wait_until(look, describe=never)
    assert looked_s == pytest.approx([0.0, 0.02, 0.06, 0.14])


def test_a_long_wait_says_for_what_after_five_seconds_and_then_every_thirty(caplog: pytest.LogCaptureFixture) -> None:
    time, said = FakeTime(), []
    patience = Patience(timeout_s=70, clock=lambda: time.now_s, sleep=time.sleep)
    assert not patience.wait_until(lambda: False, describe=lambda: said.append(time.now_s) or "shard 3")
    assert said == pytest.approx([5.26, 35.26, 65.26])
    assert caplog.messages == [
        f"[Rollout Mock] Waiting for shard 3, for at most 70 s ({seconds} s so far)" for seconds in (5, 35, 65)
    ]
