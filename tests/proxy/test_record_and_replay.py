"""Modes real, dump and mock: what is given, counted, logged and refused."""

import gc
import logging
import os
import re
import weakref
from pathlib import Path

import pytest

import mock_scheduler.proxy.build
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import (
    ConfigError,
    ContractError,
    CorruptRecordingError,
    RecordingError,
    SchedulerError,
    StepExistsError,
    StepNotFoundError,
)
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest, RolloutScheduler
from tests.proxy.players import (
    BatchOnly,
    Player,
    batch_of,
    config,
    digests,
    dump,
    mock,
    never,
    play,
    request,
    requests,
)
from tests.recording.builders import make_contract

EMPTY = {"built": {"engine": 0, "environment": 0, "scheduler": 0}, "called": {}, "answered": {}, "suppressed": {}}


def test_mock_gives_the_dumped_batches_bit_for_bit_and_never_calls_make_real(tmp_path: Path) -> None:
    dumped = dump(tmp_path)
    scheduler = mock(tmp_path, plan=requests(range(3)))
    assert digests(scheduler.get_batch(item) for item in requests(range(3))) == digests(dumped)


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_writing_rank_refuses_a_flipped_bit_of_any_planned_step_before_the_first(tmp_path: Path) -> None:
    """Only headers were read while building: a bit in the last step was found after all training before it."""
    dump(tmp_path)
    flip_last_bit(tmp_path / "x/train/step_000002.safetensors")
    with pytest.raises(CorruptRecordingError, match=r"step_000002\.safetensors"):
        mock(tmp_path, plan=requests(range(3)))
    mock(tmp_path, plan=requests(range(3)), is_writer=False)
    mock(tmp_path, plan=requests(range(2)))


def test_a_verification_that_takes_long_says_what_it_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path)
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    plan = requests(range(3))
    mock(tmp_path, plan=plan)
    assert not any("Verified" in message for message in caplog.messages)
    monkeypatch.setattr(mock_scheduler.proxy.build, "_SLOW_CHECK_S", -1.0)
    mock(tmp_path, plan=plan)
    mock(tmp_path, plan=plan, is_writer=False)
    (message,) = [message for message in caplog.messages if "Verified" in message]
    assert re.fullmatch(r"\[Rollout Mock\] Verified 3 recorded steps \(0\.0\d\dMB\) in 0\.\d s", message)


def test_log_lines_are_those_of_the_guide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    for mode, make_real in (("dump", Player), ("mock", never)):
        settings = {"enable": True, "mode": mode, "dump_dir": "./x"}
        with build_scheduler(settings, make_real, make_contract(), plan=requests([0])) as scheduler:
            scheduler.get_batch(request(0))
    size = os.path.getsize("x/train/step_000000.safetensors") / 2**20
    assert 0.001 < size < 0.01
    assert [message for message in caplog.messages if "disk" not in message] == [
        "[Rollout Mock] Rollout Mock enabled: mode=dump, dir=./x",
        f"[Rollout Mock] Dumped step 0: ./x/train/step_000000.safetensors (samples=4, size={size:.4f}MB)",
        "[Rollout Mock] Rollout Mock enabled: mode=mock, dir=./x",
        "[Rollout Mock] Loaded step 0: ./x/train/step_000000.safetensors (samples=4)",
    ]


def test_a_foreign_section_and_a_schedule_are_announced_by_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump(tmp_path)
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    settings = config(
        tmp_path,
        "real",
        origin="skip became rollout_mock",
        schedule=[{"mode": "mock", "steps": "0-1", "kinds": ["val"]}],
    )
    build_scheduler(settings, Player, make_contract(), is_writer=False)
    assert caplog.messages == []
    build_scheduler(settings, Player, make_contract())
    assert caplog.messages == [
        "[Rollout Mock] skip became rollout_mock",
        f"[Rollout Mock] Rollout Mock enabled: mode=real, dir={tmp_path}/x",
        "[Rollout Mock] Schedule: mock for val steps 0-1",
    ]


def test_real_mode_writes_nothing_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    scheduler = build_scheduler(RolloutMockConfig(), Player, make_contract())
    assert scheduler.get_batch(request(1)).is_identical(batch_of(request(1)))
    assert scheduler.collect_metrics() == {"time/rollout_s": 0.25, "batches": 1.0}
    assert os.listdir(tmp_path) == []
    assert caplog.messages == []
    assert scheduler.ledger.as_dict() == {
        **EMPTY,
        "built": {"engine": 0, "environment": 0, "scheduler": 1},
        "called": {"get_batch": 1, "collect_metrics": 1},
        "recording": {},
    }


def test_the_real_scheduler_is_built_at_its_first_use(tmp_path: Path) -> None:
    scheduler = build_scheduler(config(tmp_path, "dump"), never, make_contract())
    assert scheduler.collect_metrics() == {}
    with pytest.raises(AssertionError, match="make_real was called"):
        scheduler.get_batch(request(0))
    scheduler.close()
    assert scheduler.ledger.as_dict()["suppressed"] == {"close": 1}


def test_in_a_live_run_every_call_reaches_the_real_scheduler_when_it_is_made(tmp_path: Path) -> None:
    for mode in ("real", "dump"):
        real = Player()
        scheduler = build_scheduler(config(tmp_path / mode, mode), lambda real=real: real, make_contract())
        scheduler.suspend()
        assert real.calls == ["suspend"]
        scheduler.update_weights(3)
        scheduler.resume()
        assert real.calls == ["suspend", ("update_weights", 3), "resume"]
        scheduler.close()


def test_ledger_of_a_dump_counts_steps_and_bytes_on_disk(tmp_path: Path) -> None:
    ledger = Ledger()
    dump(tmp_path, ledger=ledger)
    files = list((tmp_path / "x/train").glob("step_*"))
    assert ledger.as_dict() == {
        "built": {"engine": 0, "environment": 0, "scheduler": 1},
        "called": {"get_batch": 3, "collect_metrics": 3, "state_dict": 3, "close": 1},
        "answered": {},
        "suppressed": {},
        "recording": {"recorded_steps": 3, "recorded_bytes": sum(file.stat().st_size for file in files)},
    }


def test_ledger_of_a_mock_run_counts_what_was_answered_and_suppressed(tmp_path: Path) -> None:
    dump(tmp_path)
    scheduler = mock(tmp_path)
    for _ in play(scheduler, range(2)):
        scheduler.collect_metrics()
    scheduler.load_state_dict(scheduler.state_dict())
    scheduler.close()
    assert scheduler.ledger.as_dict() == {
        "built": {"engine": 0, "environment": 0, "scheduler": 0},
        "called": {},
        "answered": {"get_batch": 2, "collect_metrics": 2, "state_dict": 1, "load_state_dict": 1},
        "suppressed": {"suspend": 2, "update_weights": 2, "resume": 2, "close": 1},
        "recording": {},
    }


def test_recorded_metrics_are_kept_apart_from_live_ones(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as live:
        live.get_batch(request(0))
        assert live.collect_metrics() == {"time/rollout_s": 0.25, "batches": 1.0}
    scheduler = mock(tmp_path)
    assert scheduler.collect_metrics() == {}
    scheduler.get_batch(request(0))
    assert scheduler.collect_metrics() == {"recorded/time/rollout_s": 0.25, "recorded/batches": 1.0}


def test_mock_state_is_marked_and_as_far_as_the_real_one_was(tmp_path: Path) -> None:
    expected = {"policy_version": 1, "last_steps": {"train": 1}, "scheduler": {"cursor": 2}}
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as live:
        play(live, range(2))
        assert live.state_dict() == {"mode": "dump", **expected}
    scheduler = mock(tmp_path)
    play(scheduler, range(2))
    assert scheduler.state_dict() == {"mode": "mock", **expected}
    scheduler.update_weights(2)
    assert scheduler.state_dict()["policy_version"] == 2


def test_policy_versions_of_turns_and_staleness_are_those_that_were_played(tmp_path: Path) -> None:
    (dumped,) = dump(tmp_path, [0])
    replayed = mock(tmp_path).get_batch(request(0))
    assert replayed.policy_versions.tolist() == dumped.policy_versions.tolist()
    assert RecordingReader(str(tmp_path / "x")).load_step(request(0)).info.policy_version == 0


def test_a_real_run_goes_on_from_a_mock_checkpoint(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    scheduler = mock(tmp_path)
    scheduler.get_batch(request(0))
    state = scheduler.state_dict()
    real = Player()
    live = build_scheduler(RolloutMockConfig(), lambda: real, make_contract())
    live.load_state_dict(state)
    assert real.calls == [("load_state_dict", {"cursor": 1})]
    again = mock(tmp_path)
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(SchedulerError, match=r"cannot be loaded: it has \['epoch'\]"):
        again.load_state_dict({"epoch": 1})


@pytest.mark.parametrize("mode", ["dump", "mock", "cache"])
def test_every_mode_starts_at_the_step_of_a_checkpoint(tmp_path: Path, mode: str) -> None:
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as live:
        play(live, range(2))
        state = live.state_dict()
        dumped = play(live, [2])
    settings = config(tmp_path, mode)
    options = {"plan": requests([2]), "resume": mode == "dump"}
    with build_scheduler(settings, Player, make_contract(), **options) as scheduler:
        scheduler.load_state_dict(state)
        assert digests(play(scheduler, [2])) == digests(dumped)
        after = scheduler.state_dict()
    assert after == {
        "mode": "dump" if mode == "dump" else "mock",
        "policy_version": 2,
        "last_steps": {"train": 2},
        "scheduler": {"cursor": 3},
    }


class Exploding(Player):
    """Its second batch fails."""

    error = KeyError("environment 7 died")

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        if request.global_step == 1 and not self.calls.count("failed"):
            self.calls.append("failed")
            raise self.error
        return super().get_batch(request)


def test_a_real_exception_passes_unchanged_leaves_no_step_and_the_next_call_goes_on(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), Exploding, make_contract()) as scheduler:
        scheduler.get_batch(request(0))
        with pytest.raises(KeyError) as caught:
            scheduler.get_batch(request(1))
        assert caught.value is Exploding.error
        assert caught.traceback[-1].name == "get_batch"
        assert scheduler.state_dict()["last_steps"] == {"train": 0}
        assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0]}
        scheduler.get_batch(request(1))
    assert digests(play(mock(tmp_path), range(2))) == digests(map(batch_of, requests(range(2))))


def test_a_stop_iteration_of_the_real_scheduler_passes_unchanged() -> None:
    """Thrown into a generator it would come out as a RuntimeError."""

    class Exhausted:
        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            raise StopIteration("no data left")

    with pytest.raises(StopIteration, match="no data left"):
        build_scheduler(RolloutMockConfig(), Exhausted, make_contract()).get_batch(request(0))


def test_only_the_writer_writes_and_every_rank_asks_the_real_scheduler_alike(tmp_path: Path) -> None:
    ledger = Ledger()
    assert len(dump(tmp_path, is_writer=False, ledger=ledger)) == 3
    assert not (tmp_path / "x").exists()
    assert ledger.as_dict()["called"] == {"get_batch": 3, "collect_metrics": 3, "state_dict": 3, "close": 1}


def test_planned_steps_that_exist_are_refused_before_any_rollout(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(StepExistsError, match=r"step_000001\.safetensors"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract(), plan=requests([1, 2, 3]))
    with pytest.raises(RecordingError, match="already holds a recording"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract(), plan=requests([3]))


def test_a_dump_goes_on_when_resumed(tmp_path: Path) -> None:
    ledger = Ledger()
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as scheduler:
        scheduler.get_batch(request(0))
        state = scheduler.state_dict()
        scheduler.get_batch(request(1))
    options = {"resume": True, "plan": requests([1, 2]), "ledger": ledger}
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract(), **options) as scheduler:
        scheduler.load_state_dict(state)
        play(scheduler, [1, 2])
    mock(tmp_path, plan=requests(range(3)))
    recording = ledger.as_dict()["recording"]
    assert (recording["present_steps"], recording["recorded_steps"]) == (1, 1)


def test_steps_and_every_limit_what_is_recorded_not_what_is_played(tmp_path: Path) -> None:
    batches = dump(tmp_path, range(7), settings={"steps": "1-6", "every": 2}, plan=requests(range(7)))
    assert len(batches) == 7
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [2, 4, 6]}


def test_a_plan_of_which_nothing_is_recorded_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(tmp_path, settings={"steps": "10-"}, plan=requests(range(3)))
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message == (
        "[Rollout Mock] Nothing is recorded: rollout_mock.steps=10-, every=1 leaves out every planned step"
    )
    assert not (tmp_path / "x").exists()


def test_mock_refuses_a_plan_beyond_the_recording(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(StepNotFoundError, match=r"Steps train 3-4 were not run in dump mode"):
        mock(tmp_path, plan=requests(range(5)))


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
    assert scheduler.get_batch(request(0)).is_identical(batch_of(request(0)))


def test_a_contract_can_be_names_and_values(tmp_path: Path) -> None:
    settings = config(tmp_path, "dump")
    with build_scheduler(settings, Player, {"tokenizer": "qwen", "vocab": 16}) as scheduler:
        scheduler.get_batch(request(0))
    with pytest.raises(ContractError, match='tokenizer: recorded "qwen", current "llama"'):
        build_scheduler(config(tmp_path, "mock"), never, {"tokenizer": "llama", "vocab": 16})


def test_a_configuration_can_be_a_plain_mapping_and_all_its_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler({"enable": True, "mode": "replay", "dump_path": "x"}, never, make_contract())
    lines = str(caught.value).splitlines()
    assert lines[0] == "rollout_mock has 2 problems:"
    assert lines[1] == "  - rollout_mock.mode: unknown mode 'replay'; known modes: real, dump, mock, cache, verify"
    assert lines[2].startswith("  - rollout_mock.dump_path: unknown key; nearest known key: rollout_mock.dump_dir; ")


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is_write"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract(), is_write=True)


def test_repeat_gives_the_nearest_step_and_says_so_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(tmp_path, [2, 4, 5])
    plan = requests((0, 3, 4, 9))
    settings = config(tmp_path, "mock", missing_step="repeat")
    scheduler = build_scheduler(settings, never, make_contract(), plan=plan)
    caplog.clear()
    replayed = [scheduler.get_batch(item) for item in plan]
    assert digests(replayed) == digests(map(batch_of, requests([2, 2, 4, 5])))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"[Rollout Mock] train step {step} is not recorded: step {other} stands for it "
        "(rollout_mock.missing_step=repeat)"
        for step, other in ((0, 2), (3, 2), (9, 5))
    ]
    assert scheduler.ledger.as_dict()["recording"] == {"repeated_steps": 3}
    assert scheduler.state_dict()["last_steps"] == {"train": 9}


def test_a_step_that_stands_for_another_may_be_of_another_policy_version_and_cursor(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as scheduler:
        scheduler.get_batch(request(2, data_cursor={"epoch": 0}))
    settings, plan = config(tmp_path, "mock", missing_step="repeat"), [request(5, data_cursor={"epoch": 3})]
    replayed = build_scheduler(settings, never, make_contract(), plan=plan).get_batch(plan[0])
    assert replayed.is_identical(batch_of(request(2)))
    own = [request(2, policy_version=7)]
    with pytest.raises(RecordingError, match="was recorded with policy version 2; the run asks for policy version 7"):
        build_scheduler(settings, never, make_contract(), plan=own)


def test_a_step_of_another_policy_version_is_refused(tmp_path: Path) -> None:
    """Batches of other weights were trained on as if they were those of this step."""
    dump(tmp_path, [1])
    text = (
        f"[Rollout Mock] {tmp_path}/x/train/step_000001.safetensors was recorded with policy version 1; the run asks "
        "for policy version 77. Start from the checkpoint of the recording, with as many optimizer updates per step as "
        "it has, or record again."
    )
    for build in (lambda: mock(tmp_path), lambda: build_scheduler(config(tmp_path, "cache"), never, make_contract())):
        with pytest.raises(RecordingError) as caught:
            build().get_batch(request(1, policy_version=77))
        assert str(caught.value) == text
    with pytest.raises(RecordingError) as caught:
        mock(tmp_path, plan=[request(1, policy_version=77)])
    assert str(caught.value) == text


def test_a_recording_without_data_cursors_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(tmp_path)
    scheduler = mock(tmp_path)
    for step in range(3):
        scheduler.get_batch(request(step, data_cursor={"epoch": step}))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "[Rollout Mock] The recording has no data cursor for train step 0: where the run's data stand is not compared "
        "with it, here and wherever it has none"
    ]


@pytest.mark.parametrize("steps", [{"train": "x"}, {"train": -3}, {"train": True}, {"train": 1.0}, {"train": "3"}])
def test_a_state_whose_last_steps_are_no_steps_is_refused(tmp_path: Path, steps: dict[str, object]) -> None:
    dump(tmp_path, [0])
    scheduler = mock(tmp_path)
    with pytest.raises(SchedulerError) as caught:
        scheduler.load_state_dict({"policy_version": 4, "last_steps": {"val": 2, **steps}, "scheduler": {}})
    assert str(caught.value) == (
        f"state of the rollout scheduler cannot be loaded: last_steps has {steps}; expected a step, a whole number of "
        "at least 0, for each folder"
    )
    assert scheduler.state_dict()["policy_version"] == 0


@pytest.mark.parametrize("is_writer", [True, False])
def test_a_run_can_repeat_what_it_has_itself_recorded(tmp_path: Path, is_writer: bool) -> None:
    """verl's ``action: repeat``: the first steps are played and recorded, the later ones repeat them."""
    schedule = [{"mode": "cache", "steps": "0-1"}]
    settings = config(tmp_path, "mock", missing_step="repeat", schedule=schedule)
    plan = requests(range(5))
    writer = build_scheduler(settings, Player, make_contract(), plan=plan)
    schedulers = [writer]
    if not is_writer:
        schedulers.append(build_scheduler(settings, Player, make_contract(), plan=plan, is_writer=False))
    played = [[scheduler.get_batch(item) for scheduler in schedulers][-1] for item in plan]
    assert digests(played) == digests(map(batch_of, requests([0, 1, 1, 1, 1])))
    ledger = schedulers[-1].ledger.as_dict()
    assert (ledger["called"]["get_batch"], ledger["recording"]["repeated_steps"]) == (2, 3)
    writer.close()


def test_repeat_last_gives_the_last_step(tmp_path: Path) -> None:
    dump(tmp_path, [2, 4, 5])
    scheduler = build_scheduler(config(tmp_path, "mock", missing_step="repeat_last"), never, make_contract())
    assert digests(play(scheduler, [0, 3, 4])) == digests(map(batch_of, requests([5, 5, 4])))


def test_nothing_can_be_repeated_for_a_kind_of_which_nothing_is_recorded(tmp_path: Path) -> None:
    dump(tmp_path)
    settings = config(tmp_path, "mock", missing_step="repeat")
    with pytest.raises(StepNotFoundError, match="Step 0 was not run in dump mode"):
        build_scheduler(settings, never, make_contract(), plan=[request(0, mode="val")])


def test_a_repeated_step_is_refused_where_the_pipeline_asks_for_other_prompts(tmp_path: Path) -> None:
    """Responses beside other prompts than their own would be judged by wrong answers."""
    dump(tmp_path, [0])
    settings = config(tmp_path, "mock", missing_step="repeat")
    scheduler = build_scheduler(settings, never, make_contract())
    with pytest.raises(RecordingError, match="prompt"):
        scheduler.get_batch(request(1, prompt_digests=tuple(batch_of(request(1)).prompt_digests)))
    own = tuple(batch_of(request(0)).prompt_digests)
    assert scheduler.get_batch(request(1, prompt_digests=own)).is_identical(batch_of(request(0)))


def test_an_object_with_only_get_batch_can_be_recorded_and_replayed(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), BatchOnly, make_contract()) as live:
        dumped = play(live, [0])
        live.load_state_dict(live.state_dict())
        assert live.collect_metrics() == {}
    assert live.ledger.as_dict()["called"] == {"get_batch": 1}
    assert digests(play(mock(tmp_path), [0])) == digests(dumped)


@pytest.mark.parametrize("mode", ["real", "dump", "mock", "cache", "verify"])
def test_every_mode_has_the_interface_of_a_scheduler_and_keeps_no_batch(tmp_path: Path, mode: str) -> None:
    dump(tmp_path / "recorded", [0])
    folder = tmp_path if mode == "dump" else tmp_path / "recorded"
    make_real = never if mode in ("mock", "cache") else Player
    with build_scheduler(config(folder, mode, background=False), make_real, make_contract()) as scheduler:
        assert isinstance(scheduler, RolloutScheduler)
        batch = weakref.ref(scheduler.get_batch(request(0)).tokens)
        gc.collect(1)
        assert batch() is None


def test_a_closed_scheduler_refuses_every_call_and_closing_again_does_nothing(tmp_path: Path) -> None:
    """All but ``get_batch`` still reached the real scheduler, which had been closed."""
    real = Player()
    scheduler = build_scheduler(config(tmp_path, "dump"), lambda: real, make_contract())
    scheduler.get_batch(request(0))
    scheduler.close()
    scheduler.close()
    assert real.calls.count("close") == 1
    state = {"mode": "dump", "policy_version": 0, "last_steps": {}, "scheduler": {"cursor": 1}}
    calls: dict[str, tuple[object, ...]] = {
        "get_batch": (request(1),),
        "suspend": (),
        "resume": (),
        "update_weights": (1,),
        "collect_metrics": (),
        "state_dict": (),
        "load_state_dict": (state,),
        "checkpoint_saved": (1,),
    }
    for name, arguments in calls.items():
        with pytest.raises(SchedulerError) as caught:
            getattr(scheduler, name)(*arguments)
        assert str(caught.value) == f"{name}: the rollout scheduler was closed"
    assert real.calls[-1] == "close"


def test_closing_raises_what_the_real_scheduler_raises_and_still_writes_all(tmp_path: Path) -> None:
    class Stuck(Player):
        def close(self) -> None:
            raise OSError("engine does not stop")

    scheduler = build_scheduler(config(tmp_path, "dump"), Stuck, make_contract())
    scheduler.get_batch(request(0))
    with pytest.raises(OSError, match="engine does not stop"):
        scheduler.close()
    assert digests(play(mock(tmp_path), [0])) == digests([batch_of(request(0))])


def test_requests_of_a_mode_that_the_plan_does_not_have_are_refused(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    settings = config(tmp_path, "mock", schedule=[{"mode": "real", "steps": "1-"}])
    scheduler = build_scheduler(settings, never, make_contract(), plan=requests([0]))
    with pytest.raises(SchedulerError) as caught:
        scheduler.get_batch(request(1))
    assert str(caught.value) == (
        "train step 1 of scheduler 'default' is in mode real, but it is not in the plan, all of which is in mode mock: "
        "nothing was prepared for real. Give build_scheduler a plan with every request that will come."
    )
