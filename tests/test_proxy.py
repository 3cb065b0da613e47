import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from mock_scheduler import proxy
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import RolloutMockConfig
from mock_scheduler.errors import (
    BatchError,
    ConfigError,
    ContractError,
    CorruptRecordingError,
    RecordingError,
    SchedulerError,
    StepExistsError,
    StepNotFoundError,
)
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy import build_scheduler
from mock_scheduler.recording import Contract
from mock_scheduler.scheduler import RolloutRequest, RolloutScheduler, adapt_scheduler
from tests.recording.builders import make_batch, make_contract


class FakeScheduler:
    """A whole scheduler that plays seeded batches and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        self.calls.append(("get_batch", request.mode, request.global_step))
        return make_batch(seed=request.global_step)

    def suspend(self) -> None:
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")

    def update_weights(self, policy_version: int) -> None:
        self.calls.append(("update_weights", policy_version))

    def collect_metrics(self) -> dict[str, float]:
        return {"time/rollout_s": 0.25, "tokens": float(len(self.calls))}

    def state_dict(self) -> dict[str, object]:
        return {"cursor": len(self.calls)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.calls.append(("load_state_dict", dict(state)))

    def close(self) -> None:
        self.calls.append("close")


class BatchOnly:
    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        return make_batch(seed=request.global_step)


class Exploding:
    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        raise KeyError("environment 7 died")


def never() -> object:
    raise AssertionError("make_real was called in mock")


def config(tmp_path: Path, mode: str, **changes: object) -> RolloutMockConfig:
    return RolloutMockConfig(enable=True, mode=mode, dump_dir=str(tmp_path / "x"), **changes)


def request(step: int, **changes: object) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, "policy_version": step, **changes})


def dump(
    tmp_path: Path,
    steps: Iterable[int] = range(3),
    make_real: Callable[[], object] = FakeScheduler,
    **options: object,
) -> tuple[RolloutScheduler, list[RolloutBatch]]:
    scheduler = build_scheduler(config(tmp_path, "dump"), make_real, make_contract(), **options)
    return scheduler, [scheduler.get_batch(request(step)) for step in steps]


def mock(tmp_path: Path, contract: Contract | None = None, **options: object) -> RolloutScheduler:
    return build_scheduler(config(tmp_path, "mock"), never, contract or make_contract(), **options)


def test_mock_gives_the_dumped_batches_bit_for_bit_and_never_calls_make_real(tmp_path: Path) -> None:
    _, dumped = dump(tmp_path)
    scheduler = mock(tmp_path, plan=[request(step) for step in range(3)])
    replayed = [scheduler.get_batch(request(step)) for step in range(3)]
    assert [batch.digest() for batch in replayed] == [batch.digest() for batch in dumped]


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_writing_rank_refuses_a_flipped_bit_of_any_planned_step_before_the_first(tmp_path: Path) -> None:
    """Only headers were read while building: a bit in the last step was found after all training before it."""
    dump(tmp_path)
    plan = [request(step) for step in range(3)]
    flip_last_bit(tmp_path / "x/train/step_000002.safetensors")
    with pytest.raises(CorruptRecordingError, match=r"step_000002\.safetensors: tensor 'terminations' does not match"):
        mock(tmp_path, plan=plan)
    mock(tmp_path, plan=plan, is_writer=False)
    mock(tmp_path, plan=plan[:2])


def test_a_verification_that_takes_long_says_what_it_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path)
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    plan = [request(step) for step in range(3)]
    mock(tmp_path, plan=plan)
    assert not any("Verified" in message for message in caplog.messages)
    monkeypatch.setattr(proxy, "_SLOW_CHECK_S", -1.0)
    mock(tmp_path, plan=plan)
    mock(tmp_path, plan=plan, is_writer=False)
    (message,) = [message for message in caplog.messages if "Verified" in message]
    assert re.fullmatch(r"\[Rollout Mock\] Verified 3 recorded steps \(0\.\d\dMB\) in 0\.\d s", message)


def test_log_lines_are_those_of_the_guide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    for mode, make_real in (("dump", FakeScheduler), ("mock", never)):
        settings = RolloutMockConfig(enable=True, mode=mode, dump_dir="./x")
        build_scheduler(settings, make_real, make_contract()).get_batch(request(0))
    assert caplog.messages == [
        "[Rollout Mock] Rollout Mock enabled: mode=dump, dir=./x",
        "[Rollout Mock] Dumped step 0: ./x/train/step_000000.safetensors (samples=4, size=0.00MB)",
        "[Rollout Mock] Rollout Mock enabled: mode=mock, dir=./x",
        "[Rollout Mock] Loaded step 0: ./x/train/step_000000.safetensors (samples=4)",
    ]


def test_real_mode_writes_nothing_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    ledger = Ledger()
    scheduler = build_scheduler(RolloutMockConfig(), FakeScheduler, make_contract(), ledger=ledger)
    assert scheduler.get_batch(request(1)).is_identical(make_batch(seed=1))
    assert os.listdir(tmp_path) == []
    assert caplog.messages == []
    assert ledger.as_dict()["built"] == {"engine": 0, "environment": 0, "scheduler": 1}
    assert ledger.as_dict()["called"] == {"get_batch": 1}


def test_the_real_scheduler_is_built_at_its_first_use(tmp_path: Path) -> None:
    scheduler = build_scheduler(config(tmp_path, "dump"), never, make_contract())
    scheduler.close()
    with pytest.raises(AssertionError, match="make_real was called"):
        scheduler.get_batch(request(0))


def test_ledger_of_a_mock_run_counts_what_was_answered_and_suppressed(tmp_path: Path) -> None:
    dump(tmp_path)
    ledger = Ledger()
    scheduler = mock(tmp_path, ledger=ledger)
    for step in range(2):
        scheduler.suspend()
        scheduler.update_weights(step)
        scheduler.resume()
        scheduler.get_batch(request(step))
        scheduler.collect_metrics()
    scheduler.load_state_dict(scheduler.state_dict())
    scheduler.close()
    assert ledger.as_dict() == {
        "built": {"engine": 0, "environment": 0, "scheduler": 0},
        "called": {},
        "answered": {"get_batch": 2, "collect_metrics": 2, "state_dict": 1, "load_state_dict": 1},
        "suppressed": {"suspend": 2, "update_weights": 2, "resume": 2, "close": 1},
    }


def test_recorded_metrics_are_kept_apart_from_live_ones(tmp_path: Path) -> None:
    live, _ = dump(tmp_path, [0])
    assert live.collect_metrics() == {"time/rollout_s": 0.25, "tokens": 1.0}
    scheduler = mock(tmp_path)
    assert scheduler.collect_metrics() == {}
    scheduler.get_batch(request(0))
    assert scheduler.collect_metrics() == {"recorded/time/rollout_s": 0.25, "recorded/tokens": 1.0}


def test_mock_state_is_marked_and_as_far_as_the_real_one_was(tmp_path: Path) -> None:
    live, _ = dump(tmp_path, [0, 1])
    scheduler = mock(tmp_path)
    for step in range(2):
        scheduler.get_batch(request(step))
    expected = {"policy_version": 1, "last_steps": {"train": 1}, "scheduler": {"cursor": 2}}
    assert live.state_dict() == {"mode": "dump", **expected}
    assert scheduler.state_dict() == {"mode": "mock", **expected}
    scheduler.update_weights(2)
    assert scheduler.state_dict()["policy_version"] == 2


def test_a_real_run_goes_on_from_a_mock_checkpoint(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    scheduler = mock(tmp_path)
    scheduler.get_batch(request(0))
    state = scheduler.state_dict()
    real = FakeScheduler()
    live = build_scheduler(RolloutMockConfig(), lambda: real, make_contract())
    live.load_state_dict(state)
    assert real.calls == [("load_state_dict", {"cursor": 1})]
    again = mock(tmp_path)
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(SchedulerError, match=r"cannot be loaded: it has \['epoch'\]"):
        again.load_state_dict({"epoch": 1})


def test_a_real_exception_passes_unchanged_and_leaves_no_step(tmp_path: Path) -> None:
    scheduler, _ = dump(tmp_path, [], make_real=Exploding)
    with pytest.raises(KeyError, match="environment 7 died"):
        scheduler.get_batch(request(0))
    assert os.listdir(tmp_path / "x") == []


def test_only_the_writer_writes(tmp_path: Path) -> None:
    _, batches = dump(tmp_path, is_writer=False)
    assert len(batches) == 3
    assert not (tmp_path / "x").exists()


def test_planned_steps_that_exist_are_refused_before_any_rollout(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(StepExistsError, match=r"step_000001\.safetensors \(and 1 more\)"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract(), plan=[request(s) for s in (1, 2, 3)])
    with pytest.raises(RecordingError, match="already holds a recording"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract(), plan=[request(3)])


def test_a_dump_goes_on_when_resumed(tmp_path: Path) -> None:
    dump(tmp_path, [0, 1])
    dump(tmp_path, [2], resume=True, plan=[request(2)])
    mock(tmp_path, plan=[request(step) for step in range(3)])


def test_mock_refuses_a_plan_beyond_the_recording(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(StepNotFoundError, match=r"Steps train 3-4 were not run in dump mode"):
        mock(tmp_path, plan=[request(step) for step in range(5)])


def test_mock_refuses_validation_steps_that_were_not_recorded(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(StepNotFoundError, match=r"mode mismatch \(current: val\)\nSteps present: train 0-2\n"):
        mock(tmp_path, plan=[request(0, mode="val")])


def test_mock_refuses_a_folder_without_a_recording(tmp_path: Path) -> None:
    with pytest.raises(StepNotFoundError, match="Recording not found"):
        mock(tmp_path)


def test_mock_refuses_another_contract_and_warns_where_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(tmp_path, [0])
    other = make_contract(vocab_size=32)
    with pytest.raises(ContractError, match="vocab_size: recorded 16, current 32"):
        mock(tmp_path, other)
    scheduler = build_scheduler(config(tmp_path, "mock", on_mismatch="warn"), never, other)
    assert "vocab_size: recorded 16, current 32" in caplog.text
    assert scheduler.get_batch(request(0)).is_identical(make_batch(seed=0))


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    broken = RolloutMockConfig.model_construct(enable=True, mode="replay", dump_dir="x")
    with pytest.raises(ConfigError) as caught:
        build_scheduler(broken, never, make_contract())
    assert str(caught.value) == "rollout_mock.mode is 'replay'; known modes: real, dump, mock"


def test_a_wrong_answer_of_the_real_scheduler_is_not_recorded(tmp_path: Path) -> None:
    scheduler, _ = dump(tmp_path, [])
    with pytest.raises(BatchError) as caught:
        scheduler.get_batch(request(0, batch_size=8))
    assert str(caught.value) == "train step 0: the scheduler returned 4 trajectories; 8 were asked for"

    class Wrong:
        def get_batch(self, request: RolloutRequest) -> list[int]:
            return [1, 2]

    live = build_scheduler(RolloutMockConfig(), Wrong, make_contract())
    with pytest.raises(SchedulerError, match=r"get_batch returned list for train step 0; expected RolloutBatch"):
        live.get_batch(request(0))
    assert not (tmp_path / "x/train").exists()


def test_an_object_with_only_get_batch_can_be_recorded_and_replayed(tmp_path: Path) -> None:
    live, dumped = dump(tmp_path, [0], make_real=BatchOnly)
    live.suspend()
    live.resume()
    live.update_weights(1)
    live.load_state_dict(live.state_dict())
    live.close()
    assert live.collect_metrics() == {}
    assert mock(tmp_path).get_batch(request(0)).is_identical(dumped[0])


def test_the_adapter_calls_what_is_there_and_refuses_to_lose_a_state() -> None:
    class Partial(BatchOnly):
        closed = 0

        def close(self) -> None:
            self.closed += 1

        def collect_metrics(self) -> dict[str, float]:
            return {"m": 1.0}

    real = Partial()
    scheduler = adapt_scheduler(real)
    scheduler.close()
    assert real.closed == 1
    assert scheduler.collect_metrics() == {"m": 1.0}
    with pytest.raises(SchedulerError, match=r"Partial has no load_state_dict.*\['cursor'\]: it would be lost"):
        scheduler.load_state_dict({"cursor": 1})
    with pytest.raises(SchedulerError, match="int is no rollout scheduler: it has no method get_batch"):
        adapt_scheduler(3)
    whole = FakeScheduler()
    assert adapt_scheduler(whole) is whole


def test_schedulers_with_ids_record_beside_each_other(tmp_path: Path) -> None:
    scheduler, _ = dump(tmp_path, [0])
    batch = scheduler.get_batch(request(0, scheduler_id="math"))
    assert sorted(os.listdir(tmp_path / "x")) == ["recording.json", "train", "train.math"]
    assert mock(tmp_path).get_batch(request(0, scheduler_id="math")).is_identical(batch)


@pytest.mark.parametrize("values", [{"global_step": -1}, {"batch_size": 0}, {"mode": "test"}])
def test_a_request_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(SchedulerError, match="request: "):
        RolloutRequest(**{"global_step": 0, "batch_size": 1, **values})
