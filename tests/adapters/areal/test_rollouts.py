"""AReaL's trainer records what its actor prepares and replays it, without engines, and draws the prompts all the same.

The stand-ins have AReaL's names, arguments and order of calls (``signatures.py``); its own classes are those of
``tests/integrations/test_areal.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mock_scheduler import read_recording
from mock_scheduler.adapters.areal.rollouts import with_rollouts
from mock_scheduler.errors import BatchError, ConfigError, ContractError, SchedulerError
from mock_scheduler.ledger import Ledger
from tests.adapters.areal import signatures
from tests.adapters.areal.signatures import DataLoader, PPOTrainer, calls, config
from tests.adapters.bits import bits


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


def run(
    folder: Path, mode: str, steps: range = range(4), *, start: int | None = None, cfg: Any = None, **mock: Any
) -> tuple[Any, Ledger]:
    ledger = Ledger()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **mock}}
    made: Any = with_rollouts(PPOTrainer, settings, ledger)
    with made(cfg or config(), train_dataset=DataLoader(), start=start) as trainer:
        trainer.train(steps)
    return trainer, ledger


def test_a_replay_trains_on_the_recorded_trajectories_without_engines(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "dump")
    assert calls[:5] == ["engine", "engine", "connect_engine", "proxy", "prepare_batch"]
    calls.clear()
    replay, ledger = run(tmp_path, "mock")
    assert calls == []
    assert bits(replay.actor.trained) == bits(live.actor.trained)
    assert replay.actor.version == 4
    assert replay.train_dataloader.state_dict() == live.train_dataloader.state_dict()
    assert live.train_dataloader.position == 6  # two batches ahead of the four that were trained on
    counts = ledger.as_dict()["suppressed"]
    assert (counts["engines"], counts["evaluation_engines"], counts["connect_engine"]) == (1, 1, 1)
    assert (counts["update_weights"], counts["pause"]) == (4, 4)
    batch = read_recording(tmp_path / "dump").batch(3)
    assert (len(batch), batch.num_groups, batch.group_size, batch.sampling.temperature) == (4, 2, 2, 0.7)
    stated = [int(row[row >= 0][0]) for one in live.actor.trained[3] for row in one["versions"]]
    assert batch.policy_versions.tolist() == stated
    assert min(stated) < 3  # some are stale


def test_live_the_actor_answers_itself(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "real")
    plain = PPOTrainer(config(), DataLoader())
    plain.train(range(4))
    assert bits(live.actor.trained) == bits(plain.actor.trained)
    assert live.train_dataloader.state_dict() == plain.train_dataloader.state_dict()


def test_live_rollouts_go_on_where_replayed_ones_left_the_data(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "dump")
    calls.clear()
    mixed, _ = run(tmp_path, "real", schedule=[{"mode": "mock", "steps": "0-1"}])
    assert calls.count("prepare_batch") == 2
    assert bits(mixed.actor.trained[:2]) == bits(live.actor.trained[:2])
    # The engine that starts now draws two batches ahead of what it plays, as it did in the beginning.
    assert mixed.train_dataloader.position == live.train_dataloader.position + 2


def test_a_run_from_a_checkpoint_has_its_own_steps(tmp_path: Path) -> None:
    live, _ = run(tmp_path, "dump", range(5, 7), start=5)
    assert read_recording(tmp_path / "dump").steps == {"train": [5, 6]}
    replay, _ = run(tmp_path, "mock", range(6, 7), start=6)
    assert bits(replay.actor.trained) != bits(live.actor.trained[1:])  # the actor's version is another
    names = [name for name in replay.actor.trained[0][0] if name != "prox_logp"]
    found = [[{name: one[name] for name in names} for one in batch] for batch in replay.actor.trained]
    assert bits(found) == bits([[{name: one[name] for name in names} for one in live.actor.trained[1]]])


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1))
    with pytest.raises(ContractError, match=r"areal\.gconfig\.n_samples: recorded 2, current 4"):
        run(tmp_path, "mock", range(1), cfg=config(n_samples=4))


def test_what_the_adapter_does_not_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"missing_step=repeat has no rollout that draws prompts"):
        run(tmp_path, "mock", missing_step="repeat")
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="AREAL_SPMD_MODE is set: every process asks for its own part of a batch"):
        run(tmp_path, "dump")
    assert calls == []


def test_a_batch_of_another_size_is_refused_unless_it_may_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = signatures.Engine.prepare_batch
    monkeypatch.setattr(signatures.Engine, "prepare_batch", lambda *arguments: prepare(*arguments)[:1])
    with pytest.raises(BatchError, match="the rollout has trajectories of 1 prompts; 2 were asked for"):
        run(tmp_path / "fixed", "dump", range(1))
    varying = config(dynamic_bs=True)
    live, _ = run(tmp_path, "dump", range(2), cfg=varying)
    assert bits(run(tmp_path, "mock", range(2), cfg=varying)[0].actor.trained) == bits(live.actor.trained)


def test_an_engine_that_is_asked_in_a_replay_refuses(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1))
    replay, _ = run(tmp_path, "mock", range(1))
    with pytest.raises(SchedulerError, match=r"asked its inference engine \(rollout_batch\) in a run that only"):
        replay.rollout.rollout_batch([])
