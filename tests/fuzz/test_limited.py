"""The fuzzers' own limits: a failing, a greedy and a dying example are each found."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.fuzz.folders import FAKE, Printed
from tests.fuzz.limited import run_limited


def fail() -> None:
    raise ValueError("planted")


def take_all() -> None:
    print(len(bytearray(64 << 30)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("act", "found"), [(fail, "ValueError: planted"), (take_all, "MemoryError"), (die, "status 9")]
)
def test_a_planted_fault_is_found(act: Callable[[], None], found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        run_limited(act)


def test_a_fuzzer_without_a_fault_passes() -> None:
    run_limited(lambda: None)


@pytest.mark.parametrize("text", ["\x1b", "\x9b", "\u202e", "\t", "\ud800", f"\n{FAKE}", f"x\n  - {FAKE}"])
def test_what_acts_or_fakes_a_line_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        Printed(code=0, out=text, err="").check()
    with pytest.raises(AssertionError):
        Printed(code=70, out="", err="").check()
