"""The callback of ms-swift traces a training, and records and replays its rollouts without an engine."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler import megatron, read_recording
from mock_scheduler.adapters import ms_swift
from mock_scheduler.adapters.ms_swift import plugin, rollouts
from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from mock_scheduler.errors import BatchError, ConfigError, ContractError
from mock_scheduler.ledger import Ledger
from tests.adapters.bits import bits
from tests.adapters.ms_swift.trainer import GRPOSample, Trainer, modules


@pytest.fixture
def swift(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "ledger", Ledger())
    monkeypatch.delenv(RUN_FILE_VARIABLE, raising=False)
    monkeypatch.delenv("MOCK_SCHEDULER_MS_SWIFT", raising=False)
    return found


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the file of settings and names it."""

    def write(mode: str, section: str = "", **further: str) -> None:
        path = tmp_path / "mock.yaml"
        lines = [f"rollout_mock: {{enable: true, mode: {mode}, dump_dir: {tmp_path / 'dump'}{section}}}"]
        path.write_text("\n".join(lines + [f"{key}: {value}" for key, value in further.items()]), encoding="utf-8")
        monkeypatch.setenv("MOCK_SCHEDULER_MS_SWIFT", str(path))

    return write


def trainer(swift: dict[str, Any], **arguments: Any) -> Trainer:
    """As ms-swift makes it: the plugin is imported first, then the table's callback is given the trainer."""
    ms_swift.register()
    torch.manual_seed(7)
    return Trainer([swift["swift.megatron.callbacks"].megatron_callbacks_map["mock_scheduler"]], **arguments)


def test_a_replay_makes_no_engine_and_trains_on_the_same(swift: dict[str, Any], settings: Any, tmp_path: Path) -> None:
    settings("dump")
    live = trainer(swift)
    expected = live.train(3)
    assert live.calls == ["engine", *(f"{name} {step}" for step in range(3) for name in ("generate", "score"))]
    assert read_recording(tmp_path / "dump").steps == {"train": [0, 1, 2]}
    settings("mock")
    replayed = trainer(swift)
    assert bits(replayed.train(3)) == bits(expected)
    assert replayed.calls == []
    assert (replayed.args.use_vllm, replayed.use_vllm) == (True, True)
    counts = plugin.ledger.as_dict()
    assert counts["suppressed"] | {"close": 1} == {"engine": 1, "weight_updates": 1, "close": 1}
    assert counts["answered"]["get_batch"] == 3
    # The connection to a server is not made, either.
    assert swift["swift.megatron.pipelines.train.rlhf"].MegatronRLHF()._prepare_vllm_client() is None
    assert plugin.ledger.as_dict()["suppressed"]["server"] == 1


def test_rollouts_of_dynamic_sampling_and_of_evaluations_have_numbers_of_their_own(
    swift: dict[str, Any], settings: Any, tmp_path: Path
) -> None:
    settings("dump")
    live = trainer(swift, dynamic_sample=True)
    expected = live.train(2, rounds=2, evaluates=True)
    # Up to three more rounds may follow the first of an iteration.
    assert read_recording(tmp_path / "dump").steps == {"train": [0, 1, 4, 5], "val": [0]}
    settings("mock")
    replayed = trainer(swift, dynamic_sample=True)
    assert bits(replayed.train(2, rounds=2, evaluates=True)) == bits(expected)
    assert replayed.calls == []


def test_processes_record_their_own_samples_in_the_order_of_the_data(
    swift: dict[str, Any], settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two data-parallel ranks of two processes each; the processes of a rank lie apart, as those of a pipeline do.

    Each process is a thread: a step is on disk once all have written their part.
    """
    own = threading.local()
    group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group: own.process // 2)
    group.get_world_size = lambda group=None: 4 if group is None else 2
    monkeypatch.setattr(rollouts, "dist", group)
    state = SimpleNamespace(get_data_parallel_rank=lambda: own.process % 2)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(Trainer, "_get_rollout_group", lambda self: "the rank's", raising=False)

    def train(process: int) -> Any:
        own.process = process
        (samples, rewards, _) = trainer(swift).train(1)[0]
        return samples, rewards

    # Threads have the generators in common, which processes have not.
    settings("dump", ", random_states: none", run_id="swift-1")
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(train, range(4)))
    batch = read_recording(tmp_path / "dump").batch(0)
    assert [identity.numbers for identity in batch.identities] == [
        (group, 0, member, 0) for group in range(4) for member in range(2)
    ]
    settings("mock", ", random_states: none")
    assert [bits(train(process)) for process in range(4)] == [bits(one) for one in expected]


def test_a_replay_of_another_run_is_refused(swift: dict[str, Any], settings: Any) -> None:
    settings("dump", contract="{weights: a}")
    trainer(swift).train(1)
    settings("mock", contract="{weights: a}")
    with pytest.raises(ContractError, match=r"ms_swift\.temperature"):
        trainer(swift, temperature=0.5).train(1)
    other = trainer(swift)
    with pytest.raises(BatchError, match="2 of 2 prompts are not the recorded ones"):
        other.play([GRPOSample(messages=[{"role": "user", "content": "another"}]) for _ in range(2)])

    def learned_otherwise(self: Trainer) -> None:
        self.use_vllm, self.use_gym_env, self.disable_rollout_importance_sampling = False, False, True

    swift_trainer = type("WithoutVllm", (Trainer,), {"_init_rollout_engine": learned_otherwise})
    callback = swift["swift.megatron.callbacks"].megatron_callbacks_map["mock_scheduler"]
    with pytest.raises(ContractError, match=r"ms_swift\.disable_rollout_importance_sampling"):
        swift_trainer([callback]).train(1)


def test_without_settings_rollouts_are_its_own_and_without_a_run_file_nothing_is_traced(swift: dict[str, Any]) -> None:
    plain = trainer(swift)
    plain.train(1)
    assert plain.calls == ["engine", "generate 0", "score 0"]
    assert type(plain)._generate_completions is Trainer._generate_completions
    assert "_generate_completions" not in vars(plain)


def test_a_trainer_without_rollouts_is_refused_with_settings(swift: dict[str, Any], settings: Any) -> None:
    settings("dump")
    ms_swift.register()

    class SupervisedTrainer:
        args = state = None

    callback = swift["swift.megatron.callbacks"].megatron_callbacks_map["mock_scheduler"]
    with pytest.raises(ConfigError, match="SupervisedTrainer plays no rollouts that could be recorded"):
        callback(SupervisedTrainer())


def test_the_training_is_attached_once_and_each_iteration_is_a_step(
    swift: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Told:
        def on_train_start(self, context: Any) -> None:
            told.append(f"start {len(context.model)} {context.optimizer is plain.optimizer}")

        def __getattr__(self, name: str) -> Any:
            return lambda context: told.append(name)

    monkeypatch.setattr(megatron, "AttachCallback", Told, raising=False)
    plain = trainer(swift)
    plain.train(2)
    steps = ["on_train_step_start", "on_train_step_end"]
    assert told == ["start 1 True", *steps, *steps, "on_train_end"]


def test_without_ms_swift_the_plugin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swift.megatron.callbacks", None)
    with pytest.raises(ConfigError, match=r"ms-swift's table of callbacks cannot be imported \(.*\): the adapter was"):
        ms_swift.register()
