"""Rollouts of verl's V1 trainer are recorded and replayed by a fake TransferQueue, and other runs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from mock_scheduler import read_recording
from mock_scheduler.adapters.verl import v1_rollouts
from mock_scheduler.adapters.verl.settings import VARIABLE, VerlSettings
from mock_scheduler.adapters.verl.v1_rollouts import V1Rollouts
from mock_scheduler.adapters.verl.v1_suppress import (
    NoAgentLoops,
    quiet,
    refuse_two_recorders,
    refuse_unrecorded,
)
from mock_scheduler.errors import BatchError, ConfigError, ContractError, MockSchedulerError, SchedulerError
from mock_scheduler.ledger import Ledger
from tests.adapters.transfer_queue.queue_rows import TAG, FakeQueue, field, queue_rows
from tests.adapters.transfer_queue.test_codec import all_bits


def config(**changes: Any) -> DictConfig:
    """The part of verl's configuration that is read."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "do_sample": True, "n": 2}
    whole = {
        "data": {"train_batch_size": 2, "max_prompt_length": 4, "max_response_length": 4},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "rollout": {**plain, "val_kwargs": {**plain, "n": 1}, "agent": {}, "calculate_log_probs": True},
        },
        "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": False}},
        "reward": {"num_workers": 8, "reward_model": {"enable": False, "enable_resource_pool": False}},
        "trainer": {"v1": {"sync": {}, "separate_async": {"parameter_sync_step": 2, "hybrid_rollout": {}}}},
        "skip": {"rollout_tq": {"enable": False}},
    }
    made = OmegaConf.create(whole)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value, force_add=True)
    return made


class Run:
    """A trainer that draws prompts and samples, over a fake queue."""

    def __init__(
        self, folder: Path, mode: str, *, trainer: str = "sync", texts: Sequence[str] = "abcdefgh", **changes: Any
    ) -> None:
        options = {name: changes.pop(name) for name in ("missing_step", "schedule") if name in changes}
        section = {"enable": True, "mode": mode, "dump_dir": str(folder / "dumps"), **options}
        self.queue = FakeQueue()
        self.texts = list(texts)
        self.num_drawn = self.num_played = 0
        self.rollouts = V1Rollouts(
            config(**changes),
            mode=trainer,
            refill=self.refill,
            num_val_batches=lambda: 2,
            settings=VerlSettings(rollout_mock=section),
            store=self.queue,
        )

    def draw(self, count: int) -> None:
        drawn = self.texts[self.num_drawn : self.num_drawn + count]
        self.num_drawn += count
        self.rollouts.drew([[{"role": "user", "content": text}] for text in drawn])

    def refill(self, count: int) -> None:
        self.rollouts.num_refilled += count
        self.draw(count)

    def play(self, steps: int, *, refilled: int = 0, members: int = 2) -> Any:
        self.num_played += 1
        if refilled:
            self.refill(refilled)
        # As sampled: in the order in which rollouts ended, of a uid that no two runs share.
        keys = [f"{id(self)}{group}_{member}_0" for member in range(members) for group in "wv"]
        rows = {key: field([1], [2 + number, 5]) for number, key in enumerate(keys)}
        tags = [{**TAG, "global_steps": steps, "min_global_steps": steps - 1, "max_global_steps": steps - 1}] * len(
            keys
        )
        return self.queue.put(queue_rows(rows, tags)), {"training/evicted": refilled, "counts": {0.5: 2}}

    def step(self, number: int, **options: int) -> Any:
        self.draw(2)
        return self.sample(number, **options)

    def sample(self, number: int, **options: int) -> Any:
        return self.rollouts.sample(
            lambda **_asked: self.play(number, **options), global_steps=number, partition_id="train", batch_size=2
        )

    def validate(self, number: int) -> Any:
        return self.rollouts.sample(
            lambda **_asked: self.play(number, members=1), global_steps=number, partition_id="val", batch_size=2
        )


@pytest.fixture(autouse=True)
def _no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's files are described by transformers, which is not here."""
    monkeypatch.setattr(v1_rollouts, "describe_run", lambda config: {"n": config.actor_rollout_ref.rollout.n})


def test_rows_come_back_in_their_order_under_their_keys(tmp_path: Path) -> None:
    dump = Run(tmp_path, "dump")
    with dump.rollouts:
        played = [dump.step(number) for number in (1, 2, 3)]
    assert (dump.num_played, dump.queue.num_fetched) == (3, 3)
    for _ in range(2):
        mock = Run(tmp_path, "mock")
        with mock.rollouts:
            replayed = [mock.step(number) for number in (1, 2, 3)]
        assert (mock.num_played, mock.queue.num_fetched, mock.num_drawn) == (0, 0, 6)
        for (batch, metrics), (again, measured) in zip(played, replayed, strict=True):
            assert (again.keys, again.tags, again.partition_id) == (batch.keys, batch.tags, "train")
            assert metrics == measured
            recorded, own = dump.queue.held[tuple(batch.keys)], mock.queue.held[tuple(again.keys)]
            assert all_bits(recorded)[1][:4] == all_bits(own)[1][:4]  # type: ignore[index]
        assert mock.rollouts.ledger.as_dict()["built"]["scheduler"] == 0


def test_prompts_drawn_for_filtered_groups_are_drawn_again(tmp_path: Path) -> None:
    dump = Run(tmp_path, "dump")
    with dump.rollouts:
        dump.step(1, refilled=3)
        dump.step(2)
    mock = Run(tmp_path, "mock")
    with mock.rollouts:
        assert mock.step(1)[1]["training/evicted"] == 3
        mock.step(2)
    assert mock.num_drawn == dump.num_drawn == 7


def test_a_step_of_several_updates_is_several_steps(tmp_path: Path) -> None:
    for mode in ("dump", "mock"):
        run = Run(tmp_path, mode, trainer="separate_async")
        with run.rollouts:
            for number in (1, 2):
                run.step(number)
                run.sample(number)
        assert run.num_played == (4 if mode == "dump" else 0)
    assert read_recording(tmp_path / "dumps").steps == {"train": [1, 2, 3, 4]}


def test_a_validation_is_recorded_too(tmp_path: Path) -> None:
    for mode in ("dump", "mock"):
        run = Run(tmp_path, mode)
        with run.rollouts:
            assert [len(run.validate(5)[0].keys) for _ in range(2)] == [2, 2]
        assert run.num_played == (2 if mode == "dump" else 0)
    assert read_recording(tmp_path / "dumps").steps == {"val": [10, 11]}


def test_a_step_that_stands_for_another_states_its_versions(tmp_path: Path) -> None:
    dump = Run(tmp_path, "dump")
    with dump.rollouts:
        dump.step(1)
    mock = Run(tmp_path, "mock", texts="other ones", missing_step="repeat")
    with mock.rollouts:
        batch, _ = mock.sample(4)
    assert [(tag["min_global_steps"], tag["max_global_steps"], tag["global_steps"]) for tag in batch.tags] == [
        (3, 3, 4)
    ] * 4


def _draws_other_prompts(folder: Path) -> Callable[[], Any]:
    run = Run(folder, "mock", texts="xbcdefgh")
    return lambda: run.step(1)


def _has_other_numbers(folder: Path) -> Callable[[], Any]:
    return lambda: Run(folder, "mock", actor_rollout_ref__rollout__n=4).step(1)


def _filters_groups(folder: Path) -> Callable[[], Any]:
    return lambda: Run(folder, "mock", algorithm__filter_groups__enable=True).step(1)


def _is_another_trainer(folder: Path) -> Callable[[], Any]:
    return lambda: Run(folder, "mock", trainer="colocate_async").step(1)


@pytest.mark.parametrize(
    ("other", "kind", "problem"),
    [
        (_draws_other_prompts, BatchError, r"1 of 2 prompts are not the recorded ones: prompt 0 is now .*'x'"),
        (_has_other_numbers, ContractError, "n: recorded 2, current 4"),
        (_filters_groups, ContractError, r"verl\.algorithm\.filter_groups\.enable: recorded false, current true"),
        (_is_another_trainer, ContractError, r'trainer_mode: recorded "sync", current "colocate_async"'),
    ],
)
def test_another_run_is_refused_with_reasons(
    tmp_path: Path, other: Callable[[Path], Callable[[], Any]], kind: type[MockSchedulerError], problem: str
) -> None:
    dump = Run(tmp_path, "dump")
    with dump.rollouts:
        dump.step(1)
    with pytest.raises(kind, match=problem):
        other(tmp_path)()


def test_a_batch_that_lost_a_rollout_is_taken_as_verl_takes_it(tmp_path: Path) -> None:
    for mode in ("dump", "mock"):
        run = Run(tmp_path, mode)
        with run.rollouts:
            assert len(run.step(1, members=1)[0].keys) == 2
    with pytest.raises(BatchError, match="the batch has 6 rollouts; 4 were asked for"):
        Run(tmp_path / "more", "dump").step(1, members=3)


@pytest.mark.parametrize("mode", ["cache", "real"])
def test_a_run_that_replays_some_steps_is_refused(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path, mode, schedule=[{"mode": "mock", "steps": "1"}])
    with pytest.raises(ConfigError, match="a run replays all of its steps \\(mode mock\\) or none"):
        run.rollouts.begin()


def test_a_replay_starts_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    values = config(reward__reward_model={"enable": True, "enable_resource_pool": True})
    quiet(values, ledger)
    assert values.actor_rollout_ref.rollout.agent.agent_loop_manager_class == (
        "mock_scheduler.adapters.verl.v1_suppress.NoAgentLoops"
    )
    assert not values.reward.reward_model.enable
    assert ledger.as_dict()["suppressed"] == {"reward_model": 1}
    with pytest.raises(SchedulerError, match="before it trains"):
        NoAgentLoops.create(config=values).generate_sequences(None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reward__reward_model__enable": True}, "scores rows after they were sampled"),
        ({"distillation__enabled": True}, "a replay would start the teachers"),
        ({"skip__rollout_tq__enable": True}, "set it to false"),
        ({"trainer__v1__separate_async__hybrid_rollout__enable_switch": True}, "draws prompts by the time"),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        refuse_unrecorded(config(**changes))


def test_a_trainer_with_a_sampler_of_ours_is_refused() -> None:
    refuse_two_recorders(config())
    own = "pkg://mock_scheduler.adapters.verl.v1_sampler"
    with pytest.raises(ConfigError, match=r"records and replays by itself: take custom_sampler out"):
        refuse_two_recorders(config(trainer__v1__sampler__custom_sampler__path=own))


def test_a_replay_of_nothing_is_no_replay(tmp_path: Path) -> None:
    """verl resumes the checkpoint of the recorded run by itself, and is done."""
    dump = Run(tmp_path, "dump")
    with dump.rollouts:
        dump.step(1)
    mock = Run(tmp_path, "mock")
    with pytest.raises(ConfigError, match=r"no step was replayed\. verl resumes the last checkpoint"), mock.rollouts:
        mock.rollouts.begin()
    with pytest.raises(ValueError, match="of verl"), Run(tmp_path, "mock").rollouts:
        raise ValueError("of verl")


def test_a_key_of_trainer_v0_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "dump")
    run.rollouts.settings = VerlSettings(rollout_mock=run.rollouts.settings.rollout_mock, real="my.Manager")
    with pytest.raises(ConfigError, match=r"real: my\.Manager of MOCK_SCHEDULER_VERL names the manager .* trainer V0"):
        run.rollouts.begin()


def test_the_file_of_the_settings_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="MOCK_SCHEDULER_VERL is not set"):
        V1Rollouts(config(), mode="sync", refill=None, num_val_batches=lambda: 1)
    path = tmp_path / "mock.yaml"
    path.write_text(json.dumps({"rollout_mock": {"enable": True, "mode": "mock", "dump_dir": str(tmp_path)}}), "utf-8")
    monkeypatch.setenv(VARIABLE, str(path))
    assert V1Rollouts(config(), mode="sync", refill=None, num_val_batches=lambda: 1).is_replay_only
