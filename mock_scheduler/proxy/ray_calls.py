"""Calls an actor as a rollout scheduler: ``handle.get_batch.remote(request)`` and its answer as one call.

Contract: an error that the actor raised is raised here as it was, with its type and text; Ray's report of it is its
cause. Ray's own errors, as of an actor that has died, pass unchanged. A call is never repeated here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from mock_scheduler.errors import SchedulerError

if TYPE_CHECKING:
    from mock_scheduler.scheduler import RolloutRequest

_METHODS = (
    *("get_batch", "suspend", "resume", "update_weights", "collect_metrics", "state_dict", "load_state_dict", "close"),
    "checkpoint_saved",  # of a proxy in an actor
)


class ActorScheduler:
    """A rollout scheduler with those methods of ``RolloutScheduler`` that the actor of ``handle`` has.

    Args:
        handle: of a Ray actor. Raises ``SchedulerError`` where it has no method ``get_batch``.
    """

    get_batch: Callable[[RolloutRequest], Any]

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a class that Ray makes
        for name in _find_methods(handle):
            setattr(self, name, self._calling(handle, name))

    def _calling(self, handle: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401
        import ray

        def call(*arguments: object) -> Any:  # noqa: ANN401 - the actor's answer
            try:
                return ray.get(getattr(handle, name).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                _raise_own(error)

        return call


class AsyncActorScheduler(ActorScheduler):
    """``ActorScheduler`` for an actor whose methods run at the same time; every method is a coroutine."""

    def _calling(self, handle: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401
        import ray

        async def call(*arguments: object) -> Any:  # noqa: ANN401
            try:
                return await getattr(handle, name).remote(*arguments)
            except ray.exceptions.RayTaskError as error:
                _raise_own(error)

        return call


def as_scheduler(real: object) -> object:
    """Returns a scheduler that calls the actor where ``real`` is an actor's handle, else ``real`` itself."""
    if "ray" not in sys.modules:  # so nothing here is of Ray
        return real
    from ray.actor import ActorHandle

    if not isinstance(real, ActorHandle):
        return real
    # Ray's own word for an actor that is asynchronous or has threads. Any other does one call after the other, so that
    # its metrics are those of its last batch only where one caller asks at a time.
    is_concurrent = getattr(real, "_ray_allow_out_of_order_execution", False)
    return AsyncActorScheduler(real) if is_concurrent else ActorScheduler(real)


def _find_methods(handle: Any) -> list[str]:  # noqa: ANN401
    names = [name for name in _METHODS if hasattr(handle, name)]
    if "get_batch" not in names:
        raise SchedulerError(f"{handle!r} is no rollout scheduler: its class has no method get_batch(request)")
    return names


def _raise_own(error: Any) -> NoReturn:  # noqa: ANN401 - Ray's RayTaskError
    from ray.exceptions import RayError, RayTaskError

    # Ray raises a class of its own that is both, whose text is a report with a traceback; once more for each actor
    # that the error came through.
    cause = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, Exception) and not isinstance(cause, RayError):
        raise cause from error
    raise error
