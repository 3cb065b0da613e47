"""Values of one process: a forked child makes its own, once, and only when it asks."""

import itertools

import pytest

from mock_scheduler.support.forks import PerProcess
from tests.recording.processes import run_in_child

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_a_forked_child_makes_its_own_value_once() -> None:
    numbers = itertools.count(1)
    held = PerProcess(0, remake=lambda: next(numbers))

    def use_in_child() -> None:
        assert not held.is_own
        assert (held.get(), held.get(), held.is_own) == (1, 1, True)

    assert run_in_child(use_in_child) == "done"
    assert (held.get(), held.is_own) == (0, True)
