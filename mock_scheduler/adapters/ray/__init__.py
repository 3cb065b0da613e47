"""Ray: an actor as the rollout scheduler, and the proxy within an actor.

Contract: imports no Ray by itself; a process without Ray never meets it.
"""

from mock_scheduler.batch.pickled import in_place
from mock_scheduler.proxy.ray_calls import ActorScheduler, AsyncActorScheduler, as_scheduler

__all__ = ["ActorScheduler", "AsyncActorScheduler", "as_scheduler", "in_place"]
