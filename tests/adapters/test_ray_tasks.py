"""Tasks of a Ray cluster: what they raise, and what is said of one that never ends."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from mock_scheduler.adapters.ray.tasks import _RayTasks
from mock_scheduler.errors import ConfigError, TraceError


class RayError(Exception):
    """As Ray's: the base of all its errors."""


class RayTaskError(RayError):
    """As Ray's: of a task that raised ``cause``."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay(ModuleType):
    """A cluster on which every task ends with one error."""

    def __init__(self, error: Exception) -> None:
        super().__init__("ray")
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.__dict__.update(RayError=RayError, RayTaskError=RayTaskError)
        self.error = error

    def remote(self, task: object = None, **_: object) -> Callable[[object], FakeRay] | FakeRay:
        """Stands for the decorator, for the function that it makes, and for its result."""
        return self if task is not None else self.remote

    def get(self, _: object) -> object:
        """Raises the error."""
        raise self.error


def test_a_task_that_was_lost_each_time_is_an_error_of_ours() -> None:
    """It ended the command as an error that this project did not foresee."""
    with pytest.raises(ConfigError) as caught:
        list(_RayTasks(ray=FakeRay(RayError("the worker died")))([int]))
    assert str(caught.value) == (
        "a task was lost each of 4 times: the worker died. See whether the nodes of the Ray cluster stay up, and have "
        "the memory for one task on each CPU"
    )


def test_an_error_of_a_task_is_raised_as_the_task_raised_it() -> None:
    with pytest.raises(TraceError, match="no trace here"):
        list(_RayTasks(ray=FakeRay(RayTaskError(TraceError("no trace here"))))([int]))
