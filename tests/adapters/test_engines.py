"""A framework's worker is attached to before it first trains, and not at all where nobody asked.

That what is then traced equals what a line in a loop traces is shown in ``tests/megatron/attach/test_attach.py``.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any, cast

import pytest

from mock_scheduler import megatron
from mock_scheduler.adapters.areal import trace as areal
from mock_scheduler.adapters.engines import EngineParts, with_trace
from mock_scheduler.adapters.nemo_rl import trace as nemo_rl
from mock_scheduler.adapters.roll import trace as roll
from mock_scheduler.adapters.skyrl.trace import traced_worker
from mock_scheduler.errors import ConfigError


class Worker:
    """Trains nothing."""

    actor_module: Any = "chunks"
    optimizer: Any = "optimizer"

    def forward_backward(self, data: str) -> str:
        return f"trained on {data}"

    forward_backward.marked = "dispatch"  # type: ignore[attr-defined]


class Strategy:
    models_wrapped: Any = ("chunks",)
    optimizer: Any = "optimizer"

    def train_step(self, batch: str, loss_func: object) -> str:
        return f"trained on {batch}"


class ActorWorker:
    def initialize(self, pipeline_config: object) -> str:
        self.strategy = Strategy()
        return "initialized"


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What is attached to, where a run file is named."""
    found: list[tuple[object, ...]] = []
    # By its name alone: looking it up would import Megatron.
    monkeypatch.setitem(vars(megatron), "attach", lambda *parts: found.append(parts))
    monkeypatch.setenv("MOCK_SCHEDULER_RUN", "run.json")
    return found


def test_a_worker_is_attached_to_once_before_it_first_trains(attached: list[tuple[object, ...]]) -> None:
    worker = traced_worker(Worker)()
    assert attached == []
    assert [worker.forward_backward(data) for data in ("a", "b")] == ["trained on a", "trained on b"]
    assert attached == [("chunks", "optimizer")]
    assert isinstance(worker, Worker)
    assert type(worker).forward_backward.marked == "dispatch"  # type: ignore[attr-defined]


def test_the_engine_within_a_worker_is_attached_to(attached: list[tuple[object, ...]]) -> None:
    worker = roll.traced_worker(ActorWorker)()
    assert worker.initialize(None) == "initialized"
    assert attached == []
    assert worker.strategy.train_step(batch="a", loss_func=None) == "trained on a"
    assert worker.strategy.train_step("b", None) == "trained on b"
    assert attached == [(("chunks",), "optimizer")]
    assert Strategy().train_step("c", None) == "trained on c"  # another one's is its own
    assert len(attached) == 1


def test_nothing_is_attached_where_no_run_file_is_named(
    attached: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOCK_SCHEDULER_RUN")
    worker = traced_worker(Worker)()
    del Worker.optimizer  # an engine of another kind trains on
    try:
        assert worker.forward_backward("a") == "trained on a"
    finally:
        Worker.optimizer = "optimizer"
    assert attached == []


def test_an_engine_of_another_kind_is_refused(attached: list[tuple[object, ...]]) -> None:
    worker = with_trace(Worker, EngineParts(trains="forward_backward", chunks="model", optimizer="fsdp.optimizer"))()
    with pytest.raises(ConfigError, match=r"TracedWorker has no model and no fsdp\.optimizer when it trains"):
        worker.forward_backward("a")
    with pytest.raises(ConfigError, match=r"test_engines\.Worker has no method train_batch"):
        with_trace(Worker, areal.PARTS)
    assert attached == []


def test_a_framework_names_the_class_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AReaL's controller and ROLL's configuration do."""
    # The agentic pipeline's default: the one in base_worker has another loss.
    module: Any = ModuleType("roll.pipeline.agentic.agentic_actor_worker")
    module.ActorWorker = ActorWorker
    for name in ("roll", "roll.pipeline", "roll.pipeline.agentic"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        traced = roll.TracedActorWorker
        assert issubclass(traced, ActorWorker)
        assert pickle.loads(pickle.dumps(traced)) is traced
        assert roll.TracedActorWorker is traced
    finally:
        vars(roll).pop("TracedActorWorker", None)
    with pytest.raises(AttributeError, match="has no attribute 'ActorWorker'"):
        roll.ActorWorker  # noqa: B018 - an attribute


def test_nemo_rl_makes_its_policy_of_the_traced_actor(
    attached: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL imports the worker by its name, and starts it in the environment of the name that it stands for."""

    class MegatronPolicyWorkerImpl:
        model: Any = "chunk"
        optimizer: Any = "optimizer"

        def train(self, data: str) -> str:
            return f"trained on {data}"

    workers: Any = ModuleType("nemo_rl.models.policy.workers.megatron_policy_worker")
    workers.MegatronPolicyWorkerImpl = MegatronPolicyWorkerImpl
    workers.get_runtime_env_for_policy_worker = lambda name: {"nsight": name}
    policy, registry, ray = (
        cast("Any", ModuleType(name))
        for name in ("nemo_rl.models.policy.lm_policy", "nemo_rl.distributed.ray_actor_environment_registry", "ray")
    )
    policy.Policy = dict
    registry.ACTOR_ENVIRONMENT_REGISTRY = {f"{workers.__name__}.MegatronPolicyWorker": "mcore"}
    ray.remote = lambda **options: lambda worker: (options, worker)
    for module in (workers, policy, registry, ray):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made = nemo_rl.traced_policy(config="config")
    name = "mock_scheduler.adapters.nemo_rl.trace.TracedMegatronPolicyWorker"
    assert made == {"config": "config", "worker_extension_cls_fqn": name}
    assert registry.ACTOR_ENVIRONMENT_REGISTRY[name] == "mcore"
    try:
        options, worker = nemo_rl.TracedMegatronPolicyWorker
        assert options == {"runtime_env": {"nsight": "megatron_policy_worker"}}
        assert pickle.loads(pickle.dumps(worker)) is worker
        assert worker().train("a") == "trained on a"
        assert attached == [("chunk", "optimizer")]
    finally:
        for made_name in ("TracedMegatronPolicyWorker", "TracedMegatronPolicyWorkerImpl"):
            vars(nemo_rl).pop(made_name, None)
