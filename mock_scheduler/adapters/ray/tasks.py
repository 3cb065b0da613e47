"""Shares work out as tasks of a Ray cluster.

Contract: Ray is imported where work is shared out, and nowhere else. A task whose node is lost runs again on another;
one that is lost every time is a ``ConfigError``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.spread import Spread

T = TypeVar("T")

_ADDRESS_VARIABLE = "RAY_ADDRESS"
_NUM_RETRIES = 3
# Results wait for those before them, so that few are held.
_NUM_AHEAD = 64


@contextmanager
def spread_over_ray() -> Iterator[Spread]:
    """Yields what shares work out over the cluster that ``RAY_ADDRESS`` names; raises ``ConfigError`` without one."""
    address = os.environ.get(_ADDRESS_VARIABLE)
    if not address:
        raise ConfigError(
            f"--ray shares the work out over the cluster that {_ADDRESS_VARIABLE} names, and it is not set"
        )
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--ray needs Ray: install the extra, pip install 'mock-scheduler[ray]'") from error
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    try:
        ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({_ADDRESS_VARIABLE}): {error}") from error
    try:
        yield _RayTasks(ray=ray)
    finally:
        ray.shutdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class _RayTasks:
    """A ``Spread`` over a joined cluster: one CPU for each task."""

    ray: ModuleType

    def __call__(self, tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
        remote = self.ray.remote(num_cpus=1, max_retries=_NUM_RETRIES)(_carry_out)
        begun = [remote.remote(task) for task in tasks[:_NUM_AHEAD]]
        for position in range(len(tasks)):
            try:
                yield self.ray.get(begun[position])
            except self.ray.exceptions.RayTaskError as error:
                # As the task raised it, and not as Ray wraps it.
                raise error.cause if isinstance(error.cause, Exception) else error from None
            except self.ray.exceptions.RayError as error:
                raise ConfigError(
                    f"a task was lost each of {_NUM_RETRIES + 1} times: {error}. See whether the nodes of the Ray "
                    "cluster stay up, and have the memory for one task on each CPU"
                ) from error
            begun[position] = None
            if len(begun) < len(tasks):
                begun.append(remote.remote(tasks[len(begun)]))


def _carry_out(task: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any task
    return task()
