"""The seams of TRL's AsyncGRPOTrainer: the worker's queue, and the transfer of weights."""

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mock_scheduler.adapters.trl import AsyncRollouts
from mock_scheduler.errors import ConfigError, RecordingError
from tests.adapters.trl.test_codec import Sample
from tests.adapters.trl.test_rollouts import ARGUMENTS, Tokenizer


class LiveWorker:
    """A worker whose queue gives a sample at a time, and none now and then."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = self
        self.num_given = 0

    def qsize(self) -> int:
        return 5

    def get(self, timeout: float | None = None) -> Sample:
        self.num_given += 1
        if self.num_given % 3 == 0:
            raise queue.Empty
        return Sample(
            prompt=[],
            completion=[],
            input_ids=np.arange(3),
            completion_mask=np.array([0, 1, 1]),
            old_log_probs=np.array([0, -0.5, -0.25], dtype=np.float32),
            advantage=0.1 * self.num_given,
            model_version=0,
            group_id=self.num_given // 2,
            metrics={"reward": 0.5},
            enqueued_at=12.0,
        )


def take(rollouts: AsyncRollouts, samples: Any, count: int) -> list[Any]:
    """What the trainer's data set does: it asks again where none came in time."""
    taken: list[Any] = []
    while len(taken) < count:
        try:
            taken.append(samples.get(timeout=0.0))
        except queue.Empty:
            continue
    return taken


def open_async(tmp_path: Path, mode: str, **changes: Any) -> AsyncRollouts:
    given: dict[str, Any] = {
        "args": SimpleNamespace(**{**ARGUMENTS, **changes.pop("arguments", {})}),
        "processing_class": Tokenizer(),
        **changes,
    }
    rollouts = AsyncRollouts({"enable": True, "mode": mode, "dump_dir": str(tmp_path / "dumps")}, **given)
    if rollouts._scheduler is not None:
        codec: Any = rollouts._scheduler._core._settings.codec
        codec._make_sample = Sample  # TRL is not there
    return rollouts


def test_samples_are_recorded_in_the_order_of_the_queue_and_replayed_without_a_worker(tmp_path: Path) -> None:
    worker = LiveWorker()
    with open_async(tmp_path, "dump", rollout_worker=lambda: worker, weight_transfer=object) as rollouts:
        assert rollouts.arguments()["rollout_worker"] is worker
        trainer = SimpleNamespace(rollout_queue=worker.rollout_buffer, model_version=1)
        rollouts.attach(trainer)
        live = take(rollouts, trainer.rollout_queue, 8)
        trainer.model_version = 2
        live += take(rollouts, trainer.rollout_queue, 1)
        assert trainer.rollout_queue.qsize() == 3 + 5
    with open_async(tmp_path, "mock", rollout_worker=lambda: pytest.fail("a worker was made")) as replayed:
        given = replayed.arguments()
        given["rollout_worker"].start()
        given["rollout_worker"].update_model_version(1)
        again = take(replayed, given["rollout_worker"].rollout_buffer, 8)
        given["weight_transfer"].send_weights(iter([("w", 1)]))
        given["rollout_worker"].update_model_version(2)
        again += take(replayed, given["rollout_worker"].rollout_buffer, 1)
        given["rollout_worker"].stop()
    assert [sample.advantage for sample in again] == [sample.advantage for sample in live]
    assert {sample.enqueued_at for sample in again} == {None}
    assert replayed.ledger.as_dict()["suppressed"] == {
        "engine": 1,
        "send_weights": 1,
        "update_weights": 2,
        "close": 1,
    }


def test_a_trainer_whose_weights_are_of_another_version_is_refused(tmp_path: Path) -> None:
    worker = LiveWorker()
    with open_async(tmp_path, "dump") as rollouts:
        trainer = SimpleNamespace(rollout_queue=worker.rollout_buffer, model_version=1)
        rollouts.attach(trainer)
        take(rollouts, trainer.rollout_queue, 4)
    with (
        open_async(tmp_path, "mock") as replayed,
        pytest.raises(RecordingError, match="recorded with policy version 1"),
    ):
        take(replayed, replayed.arguments()["rollout_worker"].rollout_buffer, 4)
    with pytest.raises(ConfigError, match="token_budget is not set: the trainer would ask the vLLM server"):
        open_async(tmp_path, "mock", arguments={"token_budget": None})
