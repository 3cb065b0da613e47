"""What the plugin keeps from starting, with classes of verl's names (0.9.1), and the trace of its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.verl import suppress, trace
from mock_scheduler.adapters.verl.settings import VerlSettings
from mock_scheduler.adapters.verl.suppress import ProcessState, prepare_process, suppress_engines, this_process
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger


class LLMServerManager:
    @classmethod
    def create(cls, *_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("an engine was started")

    create_empty = create


class CheckpointEngineManager:
    def update_weights(self, global_steps: int | None = None) -> Any:
        raise AssertionError("weights were sent")


class RewardLoopManager:
    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        raise AssertionError("a worker was started")

    def compute_rm_score(self, data: Any) -> Any:
        raise AssertionError("a reward model was asked")


class MultiTeacherModelManager:
    def __init__(self, config: Any, resource_pool: Any) -> None:
        raise AssertionError("a teacher was started")

    def get_client(self) -> Any:
        return dict(self.teacher_model_managers)  # type: ignore[attr-defined]


class AgentLoopManager:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise AssertionError("workers of agent loops were started")


class AgentLoopManagerTQ(AgentLoopManager):
    """Of trainer V1."""


ROLLOUTS = {("vllm", "async"): "verl.workers.rollout.vllm_rollout.ServerAdapter"}


def find(module: str) -> Any:
    """verl's modules."""
    names: dict[str, Any] = {
        "verl.workers.rollout.llm_server": {"LLMServerManager": LLMServerManager},
        "verl.checkpoint_engine.base": {"CheckpointEngineManager": CheckpointEngineManager},
        "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": ROLLOUTS},
        "verl.experimental.reward_loop.reward_loop": {"RewardLoopManager": RewardLoopManager},
        "verl.experimental.teacher_loop.teacher_model": {"MultiTeacherModelManager": MultiTeacherModelManager},
        "verl.experimental.agent_loop.agent_loop": {"AgentLoopManager": AgentLoopManager},
    }
    return SimpleNamespace(**names[module])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    this_process.cache_clear()
    yield
    for restore in this_process().restore:
        restore()
    this_process.cache_clear()


def test_nothing_is_started_and_everything_is_counted_and_put_back() -> None:
    ledger, managers = Ledger(), (LLMServerManager, CheckpointEngineManager, RewardLoopManager, AgentLoopManager)
    before = [dict(vars(manager)) for manager in managers]
    restore = suppress_engines(ledger, find)
    servers = LLMServerManager.create(config=1, worker_group=2, rollout_resource_pool=3)
    assert (servers.get_replicas(), servers.get_addresses()) == ([], [])
    servers.start_profile()
    servers.stop_profile()
    LLMServerManager.create_empty(config=1)
    assert CheckpointEngineManager().update_weights(3) == {}
    rewards = RewardLoopManager(config=4)
    assert (rewards.config, rewards.reward_loop_workers) == (4, [])  # type: ignore[attr-defined]
    assert MultiTeacherModelManager(1, 2).get_client() == {}
    counted = {"engine": 2, "sync_weights": 1, "reward_workers": 1, "teachers": 1}
    assert ledger.as_dict()["suppressed"] == counted
    with pytest.raises(SchedulerError, match="asked its engine to generate in a run that only replays"):
        asyncio.run(servers.get_client().generate("id", prompt_ids=[1], sampling_params={}))
    with pytest.raises(SchedulerError, match="asked a reward model for scores in a run that only replays"):
        rewards.compute_rm_score(1)
    for manager in (AgentLoopManager, AgentLoopManagerTQ):
        with pytest.raises(SchedulerError, match=r"verl makes its own agent loops .* Trainer V1: set trainer\.v1"):
            manager(config=1, llm_client=servers.get_client())
    assert ROLLOUTS == {("vllm", "async"): "mock_scheduler.adapters.verl.suppress.SuppressedRollout"}
    restore()
    assert [dict(vars(manager)) for manager in managers] == before
    assert ROLLOUTS == {("vllm", "async"): "verl.workers.rollout.vllm_rollout.ServerAdapter"}


def test_a_dump_whose_rollouts_pass_no_proxy_is_refused() -> None:
    state = ProcessState()
    restore = suppress.watch_agent_loops(state, find)
    with pytest.raises(SchedulerError, match=r"no rollout would be recorded: Trainer V0: set actor_rollout_ref\."):
        AgentLoopManagerTQ(config=1, llm_client=2)
    state.has_proxy = True
    with pytest.raises(AssertionError, match="were started"):
        AgentLoopManagerTQ(config=1, llm_client=2)
    restore()
    assert not hasattr(AgentLoopManager.__init__, "__wrapped__")
    suppress.watch_agent_loops(state, lambda module: SimpleNamespace())()


def test_a_worker_takes_no_weights() -> None:
    rollout = suppress.SuppressedRollout(config=1, model_config=2, device_mesh=3)

    def weights() -> Iterator[Any]:
        raise AssertionError("weights were gathered")
        yield

    asyncio.run(rollout.resume(tags=["weights"]))
    asyncio.run(rollout.update_weights(weights(), global_steps=3))
    asyncio.run(rollout.release())


def test_another_release_of_verl_is_refused_and_left_as_it_was() -> None:
    def lacking(module: str) -> Any:
        return SimpleNamespace() if module.endswith(("reward_loop", "rollout.base")) else find(module)

    with pytest.raises(ConfigError) as refused:
        suppress_engines(Ledger(), lacking)
    assert str(refused.value) == (
        "this release of verl has no verl.experimental.reward_loop.reward_loop.RewardLoopManager.compute_rm_score, "
        "verl.workers.rollout.base._ROLLOUT_REGISTRY: it starts its engines elsewhere, and a replay would start them "
        "too. The adapter was tried with the versions that mock-scheduler frameworks lists"
    )
    with pytest.raises(AssertionError, match="an engine was started"):
        LLMServerManager.create()


def write(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("MOCK_SCHEDULER_VERL", str(path))


def test_the_plugin_touches_what_the_settings_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(suppress, "suppress_engines", lambda ledger: made.append("suppress") or (lambda: None))
    monkeypatch.setattr(suppress, "watch_agent_loops", lambda state: made.append("watch") or (lambda: None))
    monkeypatch.setattr(suppress, "trace_engines", lambda settings: made.append("trace") or (lambda: None))
    monkeypatch.delenv("MOCK_SCHEDULER_VERL", raising=False)
    monkeypatch.delenv("MOCK_SCHEDULER_RUN", raising=False)
    mock = "rollout_mock: {enable: true, mode: mock, dump_dir: x}\n"
    for text, wanted in (
        (None, []),
        (mock, ["suppress"]),
        (mock + "trace_dir: t\n", ["suppress", "trace"]),
        (mock + "with_engines: true\n", []),
        (mock.replace("mode: mock", "mode: dump"), ["watch"]),
        (mock.replace("mode: mock", "mode: cache"), ["watch"]),
        (mock.replace("mode: mock", "mode: real"), []),
        (mock.replace("enable: true", "enable: false"), []),
    ):
        if text is not None:
            write(tmp_path / "mock.yaml", text, monkeypatch)
        prepare_process()
        assert (made, this_process().is_loaded) == (wanted, True), text
        made.clear()
        this_process.cache_clear()


def test_a_plugin_that_failed_says_why_to_the_run_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl goes on without a plugin that raises, and tells nobody."""
    write(tmp_path / "mock.yaml", "rollout_mock: {enable: true, mode: mock, dump_dir: x}\n", monkeypatch)

    def fail(ledger: Ledger) -> Callable[[], None]:
        raise ImportError("no module ray")

    monkeypatch.setattr(suppress, "suppress_engines", fail)
    with pytest.raises(ImportError, match="no module ray"):
        prepare_process()
    with pytest.raises(ConfigError, match=r"was not loaded in this process: ImportError: no module ray\. Without it"):
        suppress.check_process()
    tracing = VerlSettings(rollout_mock={"enable": False}, trace_dir="t")
    with pytest.raises(ConfigError, match=r"^trace_dir needs the verl plugin .* Without it nothing is traced\. "):
        suppress.check_process(tracing)
    suppress.check_process(VerlSettings(rollout_mock={"enable": False}))


class Engine:
    """Has a model and an optimizer once it is initialised, as verl's do."""

    def __init__(self, model_type: str, backend: str, *, size: int) -> None:
        module = torch.nn.Linear(size, 2)
        self.module: Any = module if backend == "fsdp2" else [module]
        self.optimizer = object()

    def train_batch(self, data: int, loss_function: Any = None) -> int:
        return data + 1


class EngineRegistry:
    @classmethod
    def new(cls, model_type: str, backend: str, *arguments: Any, **options: Any) -> Engine:
        return Engine(model_type, backend, **options)


def test_engines_that_train_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[Any] = []
    monkeypatch.setitem(vars(trace.megatron), "attach", lambda *a, **k: attached.append((a, k)))
    monkeypatch.setattr(trace, "trace_training", lambda *a, **k: attached.append((a, k)))
    settings = VerlSettings(rollout_mock={"enable": False}, trace_dir=str(tmp_path), trace={"level": "sketch"})
    restore = trace.trace_engines(settings, lambda module: SimpleNamespace(EngineRegistry=EngineRegistry))
    engines = {
        name: EngineRegistry.new(kind, backend, size=2)
        for name, kind, backend in (
            ("actor", "language_model", "fsdp2"),
            ("critic", "value_model", "fsdp2"),
            ("reference", "language_model", "fsdp2"),
            ("megatron", "value_model", "megatron"),
        )
    }
    assert attached == []  # weights and checkpoints are not loaded yet
    for name in ("actor", "critic", "megatron", "actor"):
        assert engines[name].train_batch(1, loss_function=None) == 2
    actor, critic, megatron = (engines[name] for name in ("actor", "critic", "megatron"))
    assert attached == [
        ((actor.module, actor.optimizer), {"trace_dir": tmp_path / "actor", "trace": {"level": "sketch"}}),
        ((critic.module, critic.optimizer), {"trace_dir": tmp_path / "critic", "trace": {"level": "sketch"}}),
        ((megatron.module, megatron.optimizer), {"vocab_size": None, "prefix": "critic."}),
    ]
    restore()
    EngineRegistry.new("language_model", "megatron", size=2).train_batch(1)
    assert len(attached) == 3
