"""SkyRL's experiment records the rollouts of its generator and replays them, without engines and weights sent to them.

The stand-ins have SkyRL's names, arguments and order of calls (``signatures.py``); its classes are those of
``tests/integrations/test_skyrl.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler import read_recording
from mock_scheduler.adapters.skyrl import codec
from mock_scheduler.adapters.skyrl.rollouts import Rollouts, with_rollouts
from mock_scheduler.errors import BatchError, ConfigError, ContractError, SchedulerError
from mock_scheduler.ledger import Ledger
from tests.adapters.bits import bits
from tests.adapters.skyrl import signatures
from tests.adapters.skyrl.signatures import Experiment, TrajectoryID, config


@pytest.fixture(autouse=True)
def _ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL is not installed here."""
    monkeypatch.setattr(codec, "make_trajectory_id", TrajectoryID)


def run(folder: Path, mode: str, cfg: Any = None, **mock: Any) -> tuple[Any, dict[str, dict[str, int]]]:
    ledger = Ledger()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **mock}}
    experiment: Any = with_rollouts(Experiment, settings, ledger)(config() if cfg is None else cfg)
    experiment.run()
    return experiment, ledger.as_dict()


def outcome(experiment: Any) -> object:
    trainer = experiment.trainer
    return bits([trainer.trained, trainer.evaluated, trainer.metrics])


def test_a_replay_trains_on_the_recorded_rollouts_without_engines(tmp_path: Path) -> None:
    live, counts = run(tmp_path, "dump")
    assert live.made == ["engines", "generator"]
    assert live.trainer.inference_engine_client.calls[:3] == ["meet", "wake_up", "weights"]
    assert counts["built"]["generator"] == 1
    replay, counts = run(tmp_path, "mock")
    assert replay.made == []
    assert counts["built"].get("generator", 0) == 0
    assert outcome(replay) == outcome(live)
    assert counts["suppressed"] == {
        "close": 1,
        "engines": 1,
        "init_weight_sync_state": 1,
        "save_weights_for_sampler": 4,
        "sleep": 3,
    }
    recording = read_recording(tmp_path / "dump")
    assert recording.steps == {"train": [1, 2, 3], "val": [0]}
    batch = recording.batch(2)
    assert (len(batch), batch.num_groups, batch.group_size, batch.sampling.temperature) == (4, 2, 2, 0.5)
    assert set(batch.policy_versions.tolist()) == {1}


def test_live_the_generator_answers_itself(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "real")
    plain = Experiment(config())
    plain.run()
    assert outcome(live) == outcome(plain)


def test_a_step_of_dynamic_sampling_has_several_rollouts(tmp_path: Path) -> None:
    cfg = config(trainer__algorithm__dynamic_sampling__type="filter")
    live, _ = run(tmp_path, "dump", cfg)
    assert read_recording(tmp_path / "dump").steps["train"] == [1000, 1001, 2000, 2001, 3000, 3001]
    assert outcome(run(tmp_path, "mock", cfg)[0]) == outcome(live)
    # Where an epoch ends within a step, SkyRL asks for more than its max_sample_batches.
    short = config(
        trainer__algorithm__dynamic_sampling__type="filter", trainer__algorithm__dynamic_sampling__max_sample_batches=1
    )
    assert outcome(run(tmp_path / "short", "dump", short)[0]) == outcome(live)


def test_a_trainer_that_has_steps_played_ahead_is_refused(tmp_path: Path) -> None:
    async def ask(generator: Rollouts) -> None:
        batch: dict[str, Any] = {"prompts": [[]], "batch_metadata": signatures.BatchMetadata(1, "train")}
        batch["trajectory_ids"] = [TrajectoryID("a", 0)]
        await generator.generate(batch)
        await generator.generate(batch)

    mock = {"enable": True, "mode": "real"}
    generator = Rollouts(
        lambda: signatures.Generator(signatures.Client()), cfg=config(), settings={"rollout_mock": mock}
    )
    with pytest.raises(SchedulerError, match="train step 1 asked for more than 1 rollouts, the most that this adapter"):
        asyncio.run(ask(generator))


def test_an_experiment_that_only_evaluates_is_refused() -> None:
    class EvalOnlyEntrypoint(Experiment):
        async def run(self, inference_engine_client: object) -> None:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigError, match=r"EvalOnlyEntrypoint evaluates alone, by a run of its own kind"):
        with_rollouts(EvalOnlyEntrypoint)


def test_live_rollouts_follow_replayed_ones(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "dump")
    mixed, counts = run(tmp_path, "real", schedule=[{"mode": "mock", "steps": "0-2"}])
    assert mixed.made == ["engines", "generator"]
    assert outcome(mixed) != outcome(live)  # the third one was played by a fresh generator
    assert bits(mixed.trainer.trained[:2]) == bits(live.trainer.trained[:2])
    assert counts["answered"]["get_batch"] == 3  # two steps and the evaluation


def test_other_prompts_and_another_configuration_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "dump")
    with pytest.raises(ContractError, match=r"sampling_params\.temperature: recorded 0\.5, current 1"):
        run(tmp_path, "mock", config(generator__sampling_params__temperature=1.0))
    with pytest.raises(ContractError, match=r"eval_sampling_params\.temperature: recorded 0\.0, current 1"):
        run(tmp_path, "mock", config(generator__eval_sampling_params__temperature=1.0))
    init = Experiment.__init__

    def other_data(self: Experiment, cfg: Any) -> None:
        init(self, cfg)
        self.train_dataset[3]["env_extras"] = {"answer": 99}

    monkeypatch.setattr(Experiment, "__init__", other_data)
    with pytest.raises(BatchError, match=r"train step 1: 2 of 4 prompts are not the recorded ones: prompt 2 is now"):
        run(tmp_path, "mock")


def test_a_fully_asynchronous_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fully_async\.enabled=true plays groups at the same time"):
        Rollouts(lambda: None, cfg=config(trainer__fully_async__enabled=True))


def test_settings_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOCK_SCHEDULER_SKYRL", raising=False)
    with pytest.raises(ConfigError, match="MOCK_SCHEDULER_SKYRL is not set: name a YAML file with rollout_mock in"):
        with_rollouts(Experiment)(config())


@pytest.mark.parametrize("metadata", [{}, {"batch_metadata": signatures.BatchMetadata(None, "eval")}])  # type: ignore[arg-type]
def test_a_call_without_a_step_is_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    mock = {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}
    generator = Rollouts(
        lambda: signatures.Generator(signatures.Client()), cfg=config(), settings={"rollout_mock": mock}
    )

    async def ask() -> None:
        try:
            await generator.generate({"prompts": [[]], **metadata})
        finally:
            await generator.close()

    with pytest.raises(SchedulerError, match="asked its generator without a step in batch_metadata"):
        asyncio.run(ask())


def test_an_engine_that_is_asked_in_a_replay_refuses(tmp_path: Path) -> None:
    run(tmp_path, "dump")
    replay, _ = run(tmp_path, "mock")
    with pytest.raises(SchedulerError, match=r"asked its inference engine \(generate\) in a run that only replays"):
        replay.trainer.inference_engine_client.generate({})
