"""NeMo-RL's GRPO records rollouts and replays them, without engines, weights sent to them and environments.

The stand-ins have NeMo-RL's names, arguments and order of calls (``grpo.py``); its own code is that of
``tests/integrations/test_nemo_rl.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mock_scheduler import read_recording
from mock_scheduler.adapters.nemo_rl import values
from mock_scheduler.adapters.nemo_rl.rollouts import with_rollouts
from mock_scheduler.batch import Termination
from mock_scheduler.errors import BatchError, ConfigError, ContractError, SchedulerError
from mock_scheduler.ledger import Ledger
from tests.adapters.bits import bits
from tests.adapters.nemo_rl import grpo
from tests.adapters.nemo_rl.grpo import Tokenizer, config, prompts


@pytest.fixture(autouse=True)
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL is not installed here."""
    monkeypatch.setattr(values, "make_batch", grpo.BatchedDataDict)
    monkeypatch.setattr("mock_scheduler.adapters.nemo_rl.codec.make_batch", grpo.BatchedDataDict)
    monkeypatch.setattr("mock_scheduler.adapters.nemo_rl.rollouts.make_gym_result", grpo.NemoGymRolloutResult)
    grpo.calls.clear()


def run(
    folder: Path,
    mode: str,
    cfg: Any = None,
    tokenizer: Tokenizer | None = None,
    last: str = "i",
    **mock: Any,
) -> tuple[Any, dict[str, dict[str, int]], list[str]]:
    """Set up and train as a script does; gives what came of it, the ledger, and what was called."""
    cfg, tokenizer = config() if cfg is None else cfg, tokenizer or Tokenizer()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **mock}}
    ledger, grpo.calls[:] = Ledger(), []
    setup, grpo_train = with_rollouts(grpo.setup, grpo.grpo_train, settings, ledger)
    policy, generation, *_ = setup(cfg, tokenizer, ["data"], [])
    batches = [prompts(list(pair), tokenizer) for pair in (("abc", "de"), ("fgh", last))]
    val = [prompts(["vw"], tokenizer), prompts(["x", "yz"], tokenizer)]
    try:
        found = grpo_train(policy, generation, batches, val, tokenizer, {"math": grpo.Environment()}, cfg)
    finally:
        assert grpo.run_multi_turn_rollout is grpo.run_async_multi_turn_rollout  # NeMo-RL's own again
    for metrics in [*found["metrics"], *(one[1] for part in found["val"] for one in part)]:
        metrics.pop("timing/rollout", None)
    return found, ledger.as_dict(), list(grpo.calls)


def outcome(found: Any) -> object:
    val = [[(dict(batch), metrics) for batch, metrics in part] for part in found["val"]]
    return bits([found["trained"], found["metrics"], val])


def test_a_replay_trains_on_the_recorded_rollouts_without_an_engine(tmp_path: Path) -> None:
    live, _, called = run(tmp_path, "dump")
    assert called.count("generate") == 14
    assert {"engine", "weights", "environment", "policy.prepare_refit_info"} <= set(called)
    replay, counts, called = run(tmp_path, "mock")
    assert called == [f"step {step}" for step in (1, 1, 2, 2, 3, 3)]
    assert outcome(replay) == outcome(live)
    assert counts["answered"]["get_batch"] == 7
    assert counts["suppressed"] == {
        "close": 1,
        "engines": 1,
        "finish_generation": 3,
        "prepare_refit_info": 1,
        "refit_policy_generation": 4,
    }
    recording = read_recording(tmp_path / "dump")
    assert recording.steps == {"train": [1, 2, 3], "val": [0, 1, 2000, 2001]}
    batch = recording.batch(2)
    assert (len(batch), batch.num_groups, batch.group_size, batch.sampling.temperature) == (4, 2, 2, 0.5)
    assert set(batch.policy_versions.tolist()) == {1}
    assert {row.tag for row in batch.rows()} == {"math"}
    assert [row.termination for row in batch.rows()] == [Termination.TERMINATED] * 2 + [Termination.TRUNCATED] * 2


def test_live_nemo_rl_answers_itself(tmp_path: Path) -> None:
    live, _, _ = run(tmp_path, "real")
    grpo.calls.clear()
    tokenizer, cfg = Tokenizer(), config()
    policy, generation, *_ = grpo.setup(cfg, tokenizer, ["data"], [])
    batches = [prompts(["abc", "de"], tokenizer), prompts(["fgh", "i"], tokenizer)]
    val = [prompts(["vw"], tokenizer), prompts(["x", "yz"], tokenizer)]
    plain = grpo.grpo_train(policy, generation, batches, val, tokenizer, {"math": grpo.Environment()}, cfg)
    assert bits(live["trained"]) == bits(plain["trained"])


@pytest.mark.parametrize(
    "keys",
    [
        {"gym": True},
        {"use_dynamic_sampling": True},
        {"colocated": False},
        {"backend": "megatron"},
        {"backend": "megatron", "colocated": False},
        {"val_num_generations_per_prompt": 3},
    ],
    ids=str,
)
def test_every_kind_of_run_is_replayed(tmp_path: Path, keys: dict[str, Any]) -> None:
    live, _, _ = run(tmp_path, "dump", config(**keys))
    replay, counts, called = run(tmp_path, "mock", config(**keys))
    assert outcome(replay) == outcome(live)
    # Training's own placement stays, also where the engine shares its GPUs.
    placed = ["placed grpo_policy_cluster"] if keys == {"backend": "megatron"} else []
    assert [call for call in called if not call.startswith("step")] == placed
    assert counts["suppressed"].get("init_collective", 0) == (2 if keys.get("colocated") is False else 0)
    assert counts["suppressed"].get("init_communicator", 0) == ("backend" in keys)


def test_steps_with_dynamic_sampling_have_several_rollouts(tmp_path: Path) -> None:
    run(tmp_path, "dump", config(use_dynamic_sampling=True))
    assert read_recording(tmp_path / "dump").steps["train"] == [1000, 1001, 2000, 2001, 3000, 3001]


def test_live_rollouts_follow_replayed_ones(tmp_path: Path) -> None:
    live, _, _ = run(tmp_path, "dump")
    mixed, counts, called = run(tmp_path, "real", schedule=[{"mode": "mock", "steps": "0-2"}])
    assert bits(mixed["trained"][:2]) == bits(live["trained"][:2])
    assert bits(mixed["trained"][2]) != bits(live["trained"][2])  # played by a fresh engine
    assert called.count("engine") == 1
    assert counts["answered"]["get_batch"] == 4  # two steps, and a validation of two batches


def test_other_prompts_tokenizers_and_settings_are_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump")
    with pytest.raises(ContractError, match=r"num_generations_per_prompt: recorded 2, current 4"):
        run(tmp_path, "mock", config(num_generations_per_prompt=4))
    with pytest.raises(ContractError, match=r"policy\.generation\.temperature: recorded 0\.5, current 1"):
        run(tmp_path, "mock", config(temperature=1.0))
    with pytest.raises(ContractError, match=r"nemo_rl\.tokenizer: recorded"):
        run(tmp_path, "mock", tokenizer=Tokenizer(first=3))
    with pytest.raises(ContractError, match=r"env\.should_use_nemo_gym: recorded false, current true"):
        run(tmp_path, "mock", config(gym=True))
    with pytest.raises(BatchError, match=r"train step 1: 2 of 4 prompts are not the recorded ones: row 2 is now"):
        run(tmp_path, "mock", last="k")
    assert "engine" not in grpo.calls


@pytest.mark.parametrize(
    ("keys", "mode", "problem"),
    [
        ({"asynchronous": True}, "dump", r"grpo\.async_grpo\.enabled=true plays groups at the same time"),
        ({"data_plane": True}, "dump", r"data_plane\.enabled=true has another trainer \(grpo_train_sync\)"),
        ({"refit_transport": "nixl"}, "mock", r"refit_transport=nixl prepares the policy to send weights"),
    ],
)
def test_what_the_adapter_does_not_know_is_refused(
    tmp_path: Path, keys: dict[str, Any], mode: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, mode, config(**keys))
    assert grpo.calls == []


def test_a_replay_whose_engine_is_unknown_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "dump")
    made = grpo.VllmGeneration
    monkeypatch.setattr(grpo, "setup", _with_engine(made))
    with pytest.raises(ConfigError, match=r"the engine of this replay is tests\.adapters\.nemo_rl\.grpo\.VllmGener"):
        run(tmp_path, "mock")
    monkeypatch.undo()
    settings = {"rollout_mock": {"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "dump")}}
    setup, grpo_train = with_rollouts(grpo.setup, grpo.grpo_train, settings)
    with pytest.raises(ConfigError, match="grpo_train was called before the setup that with_rollouts returned"):
        grpo_train()
    policy, generation, *_ = setup(config(), Tokenizer(), ["data"], [])
    with pytest.raises(SchedulerError, match=r"asked its inference engine \(generate\) in a run that only replays"):
        generation.generate(2)
    engine = made(None, {})
    with pytest.raises(ConfigError, match="the engine of this replay is"):
        grpo_train(policy, engine, [], [], Tokenizer(), {}, config())


def _with_engine(kind: Any) -> Any:
    real = grpo.setup

    def setup(*arguments: Any, **options: Any) -> Any:
        policy, _, *rest = real(*arguments, **options)
        return policy, kind(None, {}), *rest

    setup.__module__ = real.__module__
    return setup


def test_a_replay_makes_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = ModuleType("nemo_rl.data.utils")
    data.create_env = made = lambda env_name, env_config: "actor"
    monkeypatch.setitem(sys.modules, data.__name__, data)
    run(tmp_path, "dump")
    settings = {"rollout_mock": {"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "dump")}}
    ledger = Ledger()
    setup, _ = with_rollouts(grpo.setup, grpo.grpo_train, settings, ledger)
    environment = data.create_env(env_name="math", env_config={})
    assert ledger.as_dict()["suppressed"] == {"environments": 1}
    with pytest.raises(SchedulerError, match=r"asked the environment math \(step\) in a run that only replays"):
        environment.step.remote([], [])
    *_, gym, _, _ = setup(config(), Tokenizer(), None, [])
    with pytest.raises(SchedulerError, match=r"asked the environment NeMo Gym \(run_rollouts\)"):
        gym.run_rollouts.remote()
    assert data.create_env is made
    assert "gym" not in grpo.calls


def test_functions_of_another_algorithm_are_refused() -> None:
    settings = {"rollout_mock": {"enable": True, "mode": "real"}}
    with pytest.raises(ConfigError, match=r"setup is of tests\..*rollouts, and grpo_train of tests\..*grpo: give both"):
        with_rollouts(run, grpo.grpo_train, settings)
    with pytest.raises(ConfigError, match=r"test_rollouts has no run_multi_turn_rollout, .*: it is another algorithm"):
        with_rollouts(run, outcome, settings)


def test_settings_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOCK_SCHEDULER_NEMO_RL", raising=False)
    with pytest.raises(ConfigError, match="MOCK_SCHEDULER_NEMO_RL is not set: name a YAML file with rollout_mock in"):
        with_rollouts(grpo.setup, grpo.grpo_train)


def test_a_rollout_outside_of_a_step_is_refused(tmp_path: Path) -> None:
    settings = {"rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}}
    with pytest.MonkeyPatch.context() as patch:

        def train(policy: Any, policy_generation: Any, batch: Any) -> None:
            grpo.run_multi_turn_rollout(policy_generation, batch, None, {})

        train.__module__ = grpo.__name__
        patch.setattr(grpo, "grpo_train", train)
        setup, grpo_train = with_rollouts(grpo.setup, grpo.grpo_train, settings)
        policy, generation, *_ = setup(config(), Tokenizer(), ["data"], [])
        with pytest.raises(SchedulerError, match="asked for a rollout outside of a step of training"):
            grpo_train(policy, generation, prompts(["a"], Tokenizer()))
