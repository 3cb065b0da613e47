"""What else must not start where every rollout of ROLL is replayed: clusters that sample or score, weights for them.

Contract: a cluster that is suppressed has no workers and no placement; what is asked of it is counted. That of reward
models is false, as where ROLL has none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mock_scheduler.ledger import Ledger

#: ROLL's names of the clusters.
INFERENCE, REWARD = "actor_infer", "reward"
_IDLE = ("load_states", "offload_states", "process_weights_after_loading", "start_server", "stop_server")


class SuppressedCluster:
    """Stands for ROLL's ``Cluster``."""

    placement_groups: tuple[Any, ...] = ()
    workers: tuple[Any, ...] = ()

    def __init__(self, name: str, worker_config: Any, ledger: Ledger) -> None:  # noqa: ANN401 - ROLL's
        self.cluster_name, self.worker_config = name, worker_config
        self._ledger = ledger
        ledger.count("suppressed", f"cluster {name}")

    def __getstate__(self) -> tuple[Any, ...]:
        """Leave the ledger here: ROLL gives its clusters to actors, of which each counts for itself."""
        return self.cluster_name, self.worker_config

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.cluster_name, self.worker_config = state
        self._ledger = Ledger()

    def __bool__(self) -> bool:
        return self.cluster_name != REWARD

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _IDLE:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return lambda *_arguments, **_options: self._ledger.count("suppressed", name)

    def initialize(self, *_arguments: object, **_options: object) -> list[object]:
        """There is no worker to wait for."""
        return []

    def get_metrics(self) -> Any:  # noqa: ANN401 - ROLL's DataProto as far as its pipeline looks
        """Nothing was measured."""
        return SimpleNamespace(meta_info={"metrics": {}})


def cluster_factory(real: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """Return what makes clusters of training as ``real`` does, and no cluster that samples or scores."""

    def make(name: str, worker_cls: Any, resource_manager: Any, worker_config: Any) -> Any:  # noqa: ANN401 - ROLL's
        if name in (INFERENCE, REWARD):
            return SuppressedCluster(name, worker_config, ledger)
        return real(name=name, worker_cls=worker_cls, resource_manager=resource_manager, worker_config=worker_config)

    return make
