"""ROLL's pipeline records what its schedulers give and replays it, without the clusters that sample and score.

The stand-ins have ROLL's names, arguments and order of calls (``signatures.py``); Ray's actors are those of
``tests/integrations/test_roll.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mock_scheduler import read_recording
from mock_scheduler.adapters.roll import codec
from mock_scheduler.adapters.roll.rollouts import with_rollouts
from mock_scheduler.errors import ConfigError, ContractError
from mock_scheduler.ledger import Ledger
from tests.adapters.bits import bits
from tests.adapters.roll import signatures
from tests.adapters.roll.signatures import AgenticPipeline, calls, config


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL is not installed here."""
    monkeypatch.setattr(codec, "make_data_proto", signatures.make_data_proto)
    calls.clear()


def run(folder: Path, mode: str, cfg: Any = None, *, resume: bool = False, **mock: Any) -> Any:
    settings = {
        "rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **mock},
        "resume": resume,
    }
    pipeline: Any = with_rollouts(AgenticPipeline, settings, Ledger())(pipeline_config=cfg or config())
    pipeline.run()
    return pipeline


def test_a_replay_trains_on_the_recorded_batches_without_the_other_clusters(tmp_path: Path) -> None:
    live = run(tmp_path, "dump")
    assert calls[:5] == [
        "cluster actor_train",
        "cluster actor_infer",
        "cluster reward",
        "scheduler train",
        "scheduler val",
    ]
    assert calls.count("weights to actor_infer") == 3
    calls.clear()
    replay = run(tmp_path, "mock")
    assert calls == ["cluster actor_train", *["to_remote"] * 4]
    assert bits(replay.trained) == bits(live.trained)
    assert max(replay.ages) < 100 < min(live.ages)
    assert replay.ledger.as_dict()["suppressed"] == {
        "cluster actor_infer": 1,
        "cluster reward": 1,
        "load_states": 3,
        "model_update_pair": 1,
        "offload_states": 3,
    }
    assert replay.counts["train"]["answered"]["get_batch"] == 3
    assert replay.counts["train"]["suppressed"]["suspend"] == 3
    recording = read_recording(tmp_path / "dump")
    assert recording.steps == {"train": [0, 1, 2], "val": [0]}
    batch = recording.batch(1)
    assert (len(batch), batch.num_groups, batch.sampling.temperature) == (4, 2, 0.8)
    # The names of ROLL's module are its own again.
    assert signatures.Cluster.__name__ == "Cluster"
    assert signatures.RolloutScheduler.__module__ == signatures.__name__


def test_live_the_scheduler_answers_itself(tmp_path: Path) -> None:
    live = run(tmp_path, "real")
    assert calls.count("to_remote") == 4
    expected = [signatures.agentic_batch(step) for step in range(3)]
    assert bits([item[0] for item in live.trained[1:]]) == bits([batch.batch for batch in expected])


def test_live_batches_follow_replayed_ones(tmp_path: Path) -> None:
    live = run(tmp_path, "dump")
    calls.clear()
    mixed = run(tmp_path, "real", schedule=[{"mode": "mock", "steps": "0-1"}])
    assert [call for call in calls if call.startswith("get_batch")] == ["get_batch train 2"]
    assert bits(mixed.trained) == bits(live.trained)


def test_a_dump_goes_on_in_its_folder(tmp_path: Path) -> None:
    run(tmp_path, "dump", config(steps=2))
    run(tmp_path, "dump", config(steps=3), resume=True)
    assert read_recording(tmp_path / "dump").steps["train"] == [0, 1, 2]


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump")
    with pytest.raises(ContractError, match=r"roll\.seed: recorded 3, current 4"):
        run(tmp_path, "mock", config(seed=4))


def test_what_the_adapter_does_not_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rollout_mock\.enable=true in ROLL's own configuration"):
        run(tmp_path, "dump", config(rollout_mock={"enable": True}))
    with pytest.raises(ConfigError, match="it is no agentic pipeline of ROLL"):
        with_rollouts(Ledger, {"rollout_mock": {"enable": False}})(config())  # type: ignore[call-arg]
    monkeypatch.delattr(signatures.RolloutScheduler, "_maybe_dump_batch")
    with pytest.raises(ConfigError, match=r"RolloutScheduler has no _maybe_dump_batch: this release of ROLL cannot be"):
        run(tmp_path, "dump")
