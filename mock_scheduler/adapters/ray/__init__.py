"""Ray: an actor as the rollout scheduler, and the proxy within an actor.

Contract: imports no Ray by itself; a process without Ray never meets it.
"""

from mock_scheduler.adapters.ray.calling import ActorScheduler, AsyncActorScheduler, as_scheduler

__all__ = ["ActorScheduler", "AsyncActorScheduler", "as_scheduler"]
