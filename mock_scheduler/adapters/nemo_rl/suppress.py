"""What else must not start where every rollout of NeMo-RL is replayed: engines, weights for them, environments.

Contract: what stands for an engine counts what is asked of it, and refuses to generate. The policy stays where training
left it. No placement group of engines apart from training is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger

#: NeMo-RL's classes of engines, by their names in the module of ``setup``.
_ENGINES = ("VllmGeneration", "SGLangGeneration", "MegatronGeneration", "TrtllmGeneration", "DynamoGeneration")
_SYNCHRONIZER, _GYM = "create_weight_synchronizer", "spinup_nemo_gym_actor"
_INFERENCE_CLUSTER = "grpo_inference_cluster"
_GENERATING = ("generate", "generate_async", "generate_text", "generate_text_async")
#: Calls of ``GenerationInterface`` and what they return without an engine.
_IDLE: Mapping[str, Any] = {
    "init_collective": [],
    "prepare_for_generation": True,
    "finish_generation": True,
    "shutdown": True,
    "prepare_refit_info": None,
    "invalidate_kv_cache": True,
    "blocks_training": False,
    "load_and_start": None,
    "clear_logger_metrics": None,
    "get_logger_metrics": {},
    "start_gpu_profiling": None,
    "stop_gpu_profiling": None,
}
#: Calls by which a policy meets its engines.
_MEETING: Mapping[str, Any] = {"init_collective": [], "prepare_refit_info": {}, "set_rollout_num_gpus_per_engine": None}


def _counting(ledger: Ledger, name: str, answer: object) -> Callable[..., Any]:
    def count(*_arguments: object, **_options: object) -> object:
        ledger.count("suppressed", name)
        return answer.copy() if isinstance(answer, list | dict) else answer

    return count


class SuppressedGeneration:
    """Stands for NeMo-RL's ``GenerationInterface``: there is no engine behind it."""

    requires_kv_scale_sync = False
    weight_synchronizer: Any = None
    dp_openai_server_base_urls: tuple[str, ...] = ()
    frontend_url = "replayed"
    num_gpus_per_engine = 1

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.count("suppressed", "engines")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _GENERATING:
            raise SchedulerError(
                f"NeMo-RL asked its inference engine ({name}) in a run that only replays: the rollout was not taken "
                "from the recording. Train with the grpo_train that with_rollouts returned"
            )
        if name in _IDLE:
            return _counting(self._ledger, name, _IDLE[name])
        raise AttributeError(f"{type(self).__name__} has no {name}")


class _Engines:
    """Stands for a class of engines; what else is asked of the class is its own."""

    def __init__(self, real: Any, ledger: Ledger) -> None:  # noqa: ANN401 - NeMo-RL's
        self._real, self._ledger = real, ledger

    def __call__(self, *_arguments: object, **_options: object) -> SuppressedGeneration:
        return SuppressedGeneration(self._ledger)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the real class
        return getattr(self._real, name)

    def init_cluster_placement_groups(self, cluster: Any, *arguments: Any) -> None:  # noqa: ANN401 - NeMo-RL's
        """Place workers as the real class does, but for engines apart from training."""
        if cluster.name == _INFERENCE_CLUSTER:
            self._ledger.count("suppressed", "init_cluster_placement_groups")
        else:
            self._real.init_cluster_placement_groups(cluster, *arguments)


class _Synchronizer:
    """Stands for a ``WeightSynchronizer``: weights go nowhere."""

    is_stale = True

    def __init__(self, ledger: Ledger) -> None:
        self.init_communicator = _counting(ledger, "init_communicator", None)
        self.sync_weights = _counting(ledger, "sync_weights", {})
        self.shutdown = _counting(ledger, "shutdown", None)


class _Environment:
    """Stands for the actor of an environment."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._name = name
        self.shutdown = SimpleNamespace(remote=lambda: import_module("ray").put(True))
        ledger.count("suppressed", "environments")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method of an actor
        raise SchedulerError(
            f"NeMo-RL asked the environment {self._name} ({name}) in a run that only replays: its answers are in the "
            "recording"
        )


def names_of_setup(module: ModuleType, ledger: Ledger) -> dict[str, object]:
    """Return what stands for names of the module while its ``setup`` runs.

    Raises:
        ConfigError: the module has none of NeMo-RL's engines.
    """
    engines = {name: _Engines(getattr(module, name), ledger) for name in _ENGINES if hasattr(module, name)}
    if not engines:
        raise ConfigError(f"{module.__name__} has none of {', '.join(_ENGINES)}: this release cannot be replayed")
    names: dict[str, object] = dict(engines)
    if hasattr(module, _SYNCHRONIZER):
        names[_SYNCHRONIZER] = lambda **_options: _Synchronizer(ledger)
    if hasattr(module, _GYM):
        names[_GYM] = lambda **_options: _Environment(ledger, "NeMo Gym")
    return names


def quiet_policy(make: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """Return what makes a policy as ``make`` does, which meets no engine."""

    def make_quiet(**arguments: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
        policy = make(**arguments)
        for name, answer in _MEETING.items():
            setattr(policy, name, _counting(ledger, name, answer))
        return policy

    return make_quiet


def check_suppressed(generation: object) -> None:
    """Stop a replay whose engine is a real one; raises ``ConfigError``."""
    if not isinstance(generation, SuppressedGeneration):
        kind = type(generation)
        raise ConfigError(
            f"the engine of this replay is {kind.__module__}.{kind.__name__}, and would run: the adapter does not know "
            "how this release of NeMo-RL makes it. The adapter was written for the one that mock-scheduler frameworks "
            "lists"
        )


def suppressed_environment(ledger: Ledger) -> Callable[..., Any]:
    """Return what stands for ``create_env``: no actor is made."""
    return lambda env_name, *_arguments, **_options: _Environment(ledger, env_name)
