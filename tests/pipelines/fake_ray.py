"""A stand-in for Ray: actors in this process, which die at the calls that a test names, and a cluster of any nodes."""

from __future__ import annotations

import pickle
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Strike = Literal["before", "after"]
"""An actor dies before it has done a call, or when it has, and its answer is lost."""


class RayError(Exception):
    """Any error of Ray's."""


class RayActorError(RayError):
    """An actor that has died."""

    actor_init_failed = False


@dataclass(frozen=True, slots=True)
class Reference:
    """An answer, or the error in its place."""

    value: Any


@dataclass(slots=True)
class Cluster:
    """Its state: calls to actors so far, by number, and the ones at which an actor dies; nodes with their CPUs.

    ``is_full``: no actor starts. ``versions``: of the actors, where they differ from this process's. ``address``: of
    its head, where somebody listens as long as that lives.
    """

    strikes: Mapping[int, Strike] = field(default_factory=dict)
    num_calls: int = 0
    num_actors: int = 0
    nodes: Sequence[float] = (4.0,)
    is_full: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    connected: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    address: str = ""


class _Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: object) -> Reference:
        return self._actor.call(self._name, arguments)


class Actor:
    """A handle, and the object itself; what crosses to it is pickled."""

    def __init__(self, cluster: Cluster, content: Any) -> None:
        self._cluster = cluster
        self._content = content
        self.is_dead = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def call(self, name: str, arguments: Sequence[object]) -> Reference:
        """Does a call, unless the actor is dead or dies at it."""
        strike = self._cluster.strikes.get(self._cluster.num_calls)
        self._cluster.num_calls += 1
        if self.is_dead or strike == "before":
            self.is_dead = True
            return Reference(RayActorError("the worker was killed"))
        result = getattr(self._content, name)(*pickle.loads(pickle.dumps(arguments)))
        if strike == "after":
            self.is_dead = True
            return Reference(RayActorError("the worker was killed"))
        return Reference(pickle.loads(pickle.dumps(result)))


class _ActorClass:
    def __init__(self, cluster: Cluster, of: type) -> None:
        self._cluster = cluster
        self._of = of

    def options(self, **_: object) -> _ActorClass:
        return self

    def remote(self, *arguments: object, **named: object) -> Actor:
        self._cluster.num_actors += 1
        arguments, named = pickle.loads(pickle.dumps((arguments, named)))
        return Actor(self._cluster, self._of(*arguments, **named))


def build_ray(cluster: Cluster) -> types.ModuleType:
    """Builds the module ``ray`` of this cluster; ``exceptions`` is in it."""
    ray = types.ModuleType("ray")
    exceptions = types.ModuleType("ray.exceptions")
    exceptions.__dict__.update(RayError=RayError, RayActorError=RayActorError)

    def get(asked: Reference | list[Reference]) -> Any:
        if isinstance(asked, list):
            return [get(one) for one in asked]
        if isinstance(asked.value, Exception):
            raise asked.value
        return asked.value

    def wait(asked: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        assert timeout > 0
        return ([], asked) if cluster.is_full else (asked, [])

    def init(**options: object) -> None:
        if cluster.refusal:
            raise RuntimeError(cluster.refusal)
        cluster.connected.update(options)

    def kill(actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        actor.is_dead = True

    private = types.ModuleType("ray._private")
    node = types.SimpleNamespace(get_logs_dir_path=lambda: "/tmp/ray/session/logs")
    private.__dict__["worker"] = types.SimpleNamespace(global_worker=types.SimpleNamespace(node=node))
    ray.__dict__.update(
        _private=private,
        get_runtime_context=lambda: types.SimpleNamespace(gcs_address=cluster.address),
        __version__="2.60.0",
        exceptions=exceptions,
        get=get,
        wait=wait,
        init=init,
        kill=kill,
        remote=lambda of: _ActorClass(cluster, of),
        is_initialized=lambda: bool(cluster.connected),
        shutdown=cluster.connected.clear,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in cluster.nodes],
        available_resources=lambda: {"CPU": 0.5},
    )
    return ray
