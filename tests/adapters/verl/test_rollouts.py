"""The seam of verl's trainer V0, with its configuration's keys and an agent loop of its signatures (verl 0.9.1)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from mock_scheduler import read_recording
from mock_scheduler.adapters import verl
from mock_scheduler.adapters.verl import description, suppress
from mock_scheduler.adapters.verl.rollouts import AgentLoopManager
from mock_scheduler.adapters.verl.settings import VerlSettings
from mock_scheduler.errors import BatchError, ConfigError, ContractError
from tests.adapters.verl.protos import Proto, assert_equal, codec, drawn, played

calls: list[str] = []


class Real:
    """Plays as verl's manager does: it adds a priority to the prompts, and draws from this process's generators."""

    @classmethod
    def create(cls, config: Any, llm_client: Any = None, **_options: Any) -> Real:
        calls.append("create")
        return cls()

    def generate_sequences(self, prompts: Proto) -> Proto:
        calls.append("generate")
        prompts.non_tensor_batch["priority"] = np.arange(len(prompts))
        return played(prompts, int(torch.randint(0, 1000, ())) + random.randrange(1000))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process of its own, whose plugin was loaded; a model's files are not read."""
    calls.clear()
    suppress.this_process.cache_clear()
    suppress.this_process().is_loaded = True
    monkeypatch.setattr(description, "describe_checkpoint", lambda model: {"verl.model.hidden_size": model.size})
    yield
    suppress.this_process.cache_clear()


def config(**fields: Any) -> Any:
    rollout = {"n": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "val_kwargs": {"n": 1, "temperature": 0}}
    rollout["val_kwargs"] |= {"top_k": -1, "top_p": 1.0}
    value = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": rollout, "model": {"size": 8}},
        "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
    }
    made = OmegaConf.create(value)
    for key, one in fields.items():
        OmegaConf.update(made, key.replace("__", "."), one)
    return made


def settings(folder: Path, mode: str, **fields: Any) -> VerlSettings:
    mock = {"enable": True, "mode": mode, "dump_dir": str(folder / "dump")}
    return VerlSettings(rollout_mock=mock, real=f"{__name__}.Real", **fields)


def manager(folder: Path, mode: str, run: Any = None, **fields: Any) -> AgentLoopManager:
    return AgentLoopManager(config() if run is None else run, codec=codec(), settings=settings(folder, mode, **fields))


def train(folder: Path, mode: str, words: tuple[str, ...] = ("a", "b", "c")) -> tuple[list[Proto], list[float]]:
    """Steps of a training with an evaluation before them; the trainer draws after each."""
    random.seed(5)
    torch.manual_seed(5)
    loops = manager(folder, mode)
    evaluation = drawn(["v", "w", "v"], step=0)
    evaluation.meta_info["validate"] = True
    batches, numbers = [loops.generate_sequences(evaluation)], [random.random()]
    for step, word in enumerate(words, 1):
        batches.append(loops.generate_sequences(drawn([word, "x"], step=step, n=2)))
        numbers += [random.random(), torch.rand(()).item()]
    loops.close()
    return batches, numbers


def test_a_replay_gives_the_batches_and_leaves_the_generators_where_they_were(tmp_path: Path) -> None:
    live, numbers = train(tmp_path, "dump")
    assert calls == ["create"] + ["generate"] * 4
    calls.clear()
    replayed, again = train(tmp_path, "mock")
    assert calls == []
    assert suppress.this_process().ledger.as_dict()["answered"] == {"get_batch": 4}
    for one, other in zip(live, replayed, strict=True):
        assert_equal(other, one)
    assert again == numbers


def test_a_recording_has_steps_of_both_kinds(tmp_path: Path) -> None:
    live, _ = train(tmp_path, "dump")
    recording = read_recording(tmp_path / "dump")
    assert recording.steps == {"train": [1, 2, 3], "val": [0]}
    batch = recording.batch(2)
    assert (len(batch), batch.num_groups, batch.group_size, set(batch.policy_versions.tolist())) == (4, 2, 2, {1})
    assert recording.batch(0, mode="val").sampling.temperature == 0
    mask = live[2].batch["response_mask"].bool()
    assert batch.rewards.tolist() == (live[2].batch["rm_scores"] * mask).sum(1).tolist()


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    train(tmp_path, "dump")
    with pytest.raises(BatchError, match=r"row 0: raw_prompt is now .*'content': 'z'"):
        train(tmp_path, "mock", ("a", "z"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"actor_rollout_ref__rollout__n": 4}, r"verl\.actor_rollout_ref\.rollout\.n: recorded 2, current 4"),
        ({"actor_rollout_ref__model__size": 9}, r"verl\.model\.hidden_size: recorded 8, current 9"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    train(tmp_path, "dump")
    with pytest.raises(ContractError, match=problem):
        manager(tmp_path, "mock", config(**changed))


def test_rewards_made_behind_the_seam_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set reward\.reward_model.enable_resource_pool=True"):
        manager(tmp_path, "dump", config(reward__reward_model__enable=True))


def test_a_batch_of_the_other_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"asked with a dict; expected a DataProto\. This class is for trainer V0"):
        manager(tmp_path, "dump").generate_sequences({})


def test_a_manager_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    mock = {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}
    loops = AgentLoopManager(config(), codec=codec(), settings=VerlSettings(rollout_mock=mock, real="no.such.Manager"))
    with pytest.raises(ConfigError, match=r"real: no\.such\.Manager of MOCK_SCHEDULER_VERL cannot be imported"):
        loops.generate_sequences(drawn(["a", "b"], n=2))


def test_verl_asks_for_the_class_by_name_and_gets_it_with_the_plugin_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mock.yaml"
    path.write_text("rollout_mock: {enable: true, mode: mock, dump_dir: dump}\n", encoding="utf-8")
    monkeypatch.setenv("MOCK_SCHEDULER_VERL", str(path))
    assert verl.AgentLoopManager is AgentLoopManager
    suppress.this_process().is_loaded = False
    with pytest.raises(ConfigError) as refused:
        verl.AgentLoopManager  # noqa: B018 - verl's own getattr
    assert str(refused.value) == (
        "rollout_mock.mode=mock needs the verl plugin of mock-scheduler, which was not loaded in this process: it was "
        "not asked for (VERL_USE_EXTERNAL_PLUGINS=auto). Without it verl starts engines and sends them weights. "
        "Install mock-scheduler where each process of verl runs, and leave VERL_USE_EXTERNAL_PLUGINS unset; or set "
        "VERL_USE_EXTERNAL_MODULES=mock_scheduler.adapters.verl.plugin"
    )
    path.write_text("rollout_mock: {enable: true, mode: dump, dump_dir: dump}\n", encoding="utf-8")
    assert verl.AgentLoopManager is AgentLoopManager  # a live run needs no plugin


def test_the_description_has_what_decides_a_rollout() -> None:
    run = config(actor_rollout_ref__rollout__logprobs_mode="raw_logprobs", actor_rollout_ref__rollout__top_k=20)
    described = description.describe_run(run)
    assert described["verl.actor_rollout_ref.rollout.n"] == 2
    assert described["verl.data.train_batch_size"] == 2
    assert "verl.data.max_prompt_length" not in described
    sampling = description.read_sampling(run)
    assert (sampling["train"].top_k, sampling["val"].top_k, sampling["train"].logprobs_mode) == (20, 0, "raw")
