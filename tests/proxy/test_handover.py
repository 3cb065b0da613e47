"""Runs that replay some steps and play others: what the real scheduler has had when it answers."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ContractError, RecordingError, SchedulerError, StepNotFoundError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import RolloutRequest
from tests.proxy.players import Player, batch_of, config, digests, dump, never, play, request, requests
from tests.recording.builders import make_contract


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training steps 0 to 5 as a real run plays them, and a validation before steps 0, 2 and 4."""
    folder = tmp_path_factory.mktemp("recorded")
    with build_scheduler(config(folder, "dump"), Player, make_contract()) as scheduler:
        for step in range(6):
            scheduler.update_weights(step)
            scheduler.resume()
            if step % 2 == 0:
                scheduler.get_batch(request(step, mode="val"))
            scheduler.get_batch(request(step))
            scheduler.suspend()
    return folder


def scheduled(
    folder: Path, real: Player, schedule: list[dict[str, object]], *, mode: str = "mock", **options: object
) -> ProxyScheduler:
    settings = config(folder, mode, schedule=schedule)
    return build_scheduler(settings, lambda: real, make_contract(), **options)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_real_scheduler_that_takes_over_is_where_it_would_have_been(recorded: Path, is_planned: bool) -> None:
    real, ledger = Player(), Ledger()
    plan = requests(range(4)) if is_planned else ()
    scheduler = scheduled(recorded, real, [{"mode": "real", "steps": "2-"}], plan=plan, ledger=ledger)
    assert digests(play(scheduler, range(2))) == digests(map(batch_of, requests(range(2))))
    assert real.calls == []
    assert ledger.as_dict()["built"]["scheduler"] == 0
    play(scheduler, [2])
    # Training step 1 was the third batch of the recording run, after the validation and training of step 0.
    takes_over = [
        ("load_state_dict", {"cursor": 3}),
        *("suspend", ("update_weights", 2), "resume", ("get_batch", "train", 2), "suspend"),
    ]
    assert real.calls == takes_over
    play(scheduler, [3])
    again = [("update_weights", 3), "resume", ("get_batch", "train", 3), "suspend"]
    assert real.calls == [*takes_over, *again]
    assert scheduler.state_dict() == {
        "mode": "real",
        "policy_version": 3,
        "last_steps": {"train": 3},
        "scheduler": {"cursor": 5},
    }
    scheduler.close()
    assert ledger.as_dict() == {
        "built": {"engine": 0, "environment": 0, "scheduler": 1},
        "called": {
            "load_state_dict": 1,
            "update_weights": 2,
            "resume": 2,
            "get_batch": 2,
            "suspend": 3,
            "state_dict": 1,
            "close": 1,
        },
        "answered": {"get_batch": 2},
        "suppressed": {"update_weights": 2, "resume": 2, "suspend": 1},
        "recording": {},
    }


def test_a_pipeline_that_resumed_before_replayed_steps_finds_the_real_scheduler_generating(recorded: Path) -> None:
    real = Player()
    scheduler = scheduled(recorded, real, [{"mode": "real", "steps": "2-"}])
    scheduler.update_weights(7)
    scheduler.resume()
    for step in range(3):
        scheduler.get_batch(request(step))
    assert real.calls == [
        ("load_state_dict", {"cursor": 3}),
        ("update_weights", 7),
        "resume",
        ("get_batch", "train", 2),
    ]


def test_what_the_next_answer_is_unknown_for_is_delivered_in_order_before_it(recorded: Path) -> None:
    real = Player()
    scheduler = scheduled(recorded, real, [{"mode": "mock", "steps": "0-1"}], mode="real")
    scheduler.suspend()
    scheduler.update_weights(2)
    scheduler.resume()
    assert real.calls == []
    scheduler.get_batch(request(2))
    assert real.calls == ["suspend", ("update_weights", 2), "resume", ("get_batch", "train", 2)]


def test_a_generating_scheduler_is_suspended_at_once_even_where_the_next_step_is_replayed(recorded: Path) -> None:
    real = Player()
    scheduler = scheduled(recorded, real, [{"mode": "real", "steps": "1"}], plan=requests(range(4)))
    play(scheduler, range(2))
    assert real.calls[-2:] == [("get_batch", "train", 1), "suspend"]
    play(scheduler, range(2, 4))
    assert real.calls[-1] == "suspend"
    assert scheduler.ledger.as_dict()["suppressed"] == {"update_weights": 3, "resume": 3, "suspend": 2}


def test_the_state_of_a_checkpoint_reaches_a_real_scheduler_that_is_built_later(recorded: Path) -> None:
    real = Player()
    scheduler = scheduled(recorded, real, [{"mode": "mock", "kinds": ["val"]}], mode="real")
    state = {"mode": "mock", "policy_version": 4, "last_steps": {"train": 3}, "scheduler": {"cursor": 40}}
    scheduler.load_state_dict(state)
    assert scheduler.state_dict() == {**state, "mode": "real"}
    scheduler.get_batch(request(4, mode="val"))
    scheduler.get_batch(request(4))
    assert real.calls == [("load_state_dict", {"cursor": 40}), ("get_batch", "train", 4)]


def test_a_replayed_validation_does_not_rewind_the_data_of_live_training(recorded: Path) -> None:
    real = Player()
    scheduler = scheduled(recorded, real, [{"mode": "mock", "kinds": ["val"]}], mode="real")
    real.cursor = 100
    scheduler.get_batch(request(0))
    scheduler.get_batch(request(2, mode="val"))
    scheduler.get_batch(request(2))
    assert real.cursor == 102
    assert not any(call[0] == "load_state_dict" for call in real.calls)


def test_a_failed_hand_over_is_made_up_for_by_the_next_call(recorded: Path) -> None:
    class Refusing(Player):
        fails = True

        def load_state_dict(self, state: Mapping[str, object]) -> None:
            if self.fails:
                raise OSError("engine is not up yet")
            super().load_state_dict(state)

    real = Refusing()
    scheduler = scheduled(recorded, real, [{"mode": "real", "steps": "1-"}])
    play(scheduler, [0])
    scheduler.update_weights(1)
    with pytest.raises(OSError, match="not up yet"):
        scheduler.get_batch(request(1))
    assert real.calls == []
    real.fails = False
    scheduler.get_batch(request(1))
    assert real.calls == [
        ("load_state_dict", {"cursor": 2}),
        *("suspend", ("update_weights", 1), ("get_batch", "train", 1)),
    ]


def test_a_schedule_decides_by_kind_and_scheduler(recorded: Path) -> None:
    real = Player()
    schedule = [{"mode": "mock", "kinds": ["train"], "schedulers": ["default"]}]
    scheduler = scheduled(recorded, real, schedule, mode="real")
    for item in (request(0, mode="val"), request(0), request(0, scheduler_id="math")):
        assert scheduler.get_batch(item).is_identical(batch_of(item))
    assert [call for call in real.calls if call[0] == "get_batch"] == [
        ("get_batch", "val", 0),
        ("get_batch", "train", 0),
    ]
    assert scheduler.ledger.as_dict()["answered"] == {"get_batch": 1}


@example_settings(max_examples=25)
@given(live=st.lists(st.booleans(), min_size=6, max_size=6), is_planned=st.booleans(), suspends=st.booleans())
def test_whatever_is_replayed_every_live_answer_comes_from_where_an_all_live_run_would_be(
    recorded: Path, live: list[bool], is_planned: bool, suspends: bool
) -> None:
    """At each live step the real scheduler has the cursor, weights and activity that it would have without replays."""
    real, seen = Player(), {}

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def get_batch(self, item: RolloutRequest) -> object:
            seen[item.mode, item.global_step] = (real.cursor, real.version, real.is_running)
            return real.get_batch(item)

    schedule = [{"mode": "real", "steps": step} for step in range(6) if live[step]]
    items = [request(s, mode=m) for s in range(6) for m in ("val", "train") if m == "train" or s % 2 == 0]
    plan = items if is_planned else ()
    scheduler = build_scheduler(config(recorded, "mock", schedule=schedule), Watched, make_contract(), plan=plan)
    if not suspends:
        scheduler.resume()
    for index, item in enumerate(items):
        scheduler.update_weights(item.global_step)
        if suspends:
            scheduler.resume()
        assert scheduler.get_batch(item).is_identical(batch_of(item))
        if suspends:
            scheduler.suspend()
            assert not real.is_running
        if item.mode == "train":
            assert scheduler.state_dict()["scheduler"] == {"cursor": index + 1}
    expected = {(m.mode, m.global_step): (i, m.global_step, True) for i, m in enumerate(items) if live[m.global_step]}
    assert seen == expected


def test_a_cache_begins_a_recording_and_replays_it_the_next_time(tmp_path: Path) -> None:
    settings = config(tmp_path, "cache")
    plan = requests(range(3))
    with build_scheduler(settings, Player, make_contract(), plan=plan) as first:
        played = play(first, range(3))
    assert first.ledger.as_dict()["recording"]["cache_misses"] == 3
    with build_scheduler(settings, never, make_contract(), plan=plan) as second:
        assert digests(play(second, range(3))) == digests(played)
    assert second.ledger.as_dict()["recording"] == {"cache_hits": 3}
    assert second.ledger.as_dict()["suppressed"] == {"update_weights": 3, "resume": 3, "suspend": 3, "close": 1}


def test_a_cache_plays_and_records_only_what_is_absent(tmp_path: Path) -> None:
    dump(tmp_path, [0, 1])
    real = Player()
    with build_scheduler(
        config(tmp_path, "cache"), lambda: real, make_contract(), plan=requests(range(4))
    ) as scheduler:
        play(scheduler, range(4))
    played = [call for call in real.calls if call[0] in ("get_batch", "load_state_dict")]
    assert played == [("load_state_dict", {"cursor": 2}), ("get_batch", "train", 2), ("get_batch", "train", 3)]
    recording = scheduler.ledger.as_dict()["recording"]
    assert (recording["cache_hits"], recording["cache_misses"], recording["recorded_steps"]) == (2, 2, 2)
    reader = RecordingReader(str(tmp_path / "x"))
    assert reader.steps() == {"train": [0, 1, 2, 3]}
    states = [reader.load_step(item).info.scheduler_state for item in requests(range(4))]
    assert states == [{"cursor": step + 1} for step in range(4)]


def test_a_cache_records_only_the_steps_that_are_to_be_recorded(tmp_path: Path) -> None:
    settings = config(tmp_path, "cache", every=2)
    for _ in range(2):
        with build_scheduler(settings, Player, make_contract(), plan=requests(range(4))) as scheduler:
            play(scheduler, range(4))
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0, 2]}
    assert scheduler.ledger.as_dict()["recording"] == {"cache_hits": 2, "cache_misses": 2}


def test_no_rank_is_led_by_what_another_one_has_just_written(tmp_path: Path) -> None:
    """The second rank once found the first one's fresh step and replayed, while the first one played: they parted."""
    settings, reals = config(tmp_path, "cache"), (Player(), Player())
    first, second = (
        build_scheduler(settings, lambda real=real: real, make_contract(), is_writer=not rank)
        for rank, real in enumerate(reals)
    )
    with first:
        play(first, [0])
    play(second, [0])
    assert reals[0].calls[:3] == reals[1].calls[:3] == [("update_weights", 0), "resume", ("get_batch", "train", 0)]


def test_a_cache_refuses_a_recording_of_another_contract(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    with pytest.raises(ContractError, match="vocab_size: recorded 16, current 32"):
        build_scheduler(config(tmp_path, "cache"), never, make_contract(vocab_size=32))


def test_a_cache_that_is_complete_needs_no_right_to_write(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    (tmp_path / "x").chmod(0o555)
    try:
        with build_scheduler(config(tmp_path, "cache"), never, make_contract(), plan=requests([0])) as scheduler:
            play(scheduler, [0])
        with pytest.raises(SchedulerError, match="train step 1 is to be recorded, but the plan has no step that is"):
            build_scheduler(config(tmp_path, "cache"), Player, make_contract(), plan=requests([0])).get_batch(
                request(1)
            )
    finally:
        (tmp_path / "x").chmod(0o755)


def test_verify_plays_compares_and_gives_what_was_played(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    dump(tmp_path)
    given = []

    class Noting(Player):
        def get_batch(self, item: RolloutRequest) -> object:
            given.append(super().get_batch(item))
            return given[-1]

    scheduler = build_scheduler(config(tmp_path, "verify"), Noting, make_contract(), plan=requests(range(3)))
    batches = play(scheduler, range(3))
    assert all(batch is live for batch, live in zip(batches, given, strict=True))
    assert scheduler.ledger.as_dict()["recording"] == {"verified_steps": 3}
    assert caplog.messages[-1] == (
        f"[Rollout Mock] Verified step 2: equal to {tmp_path}/x/train/step_000002.safetensors (samples=4)"
    )
    assert scheduler.state_dict()["mode"] == "verify"


class OneBitOff(Player):
    """Plays one logprob of step 1 one unit in the last place off."""

    def get_batch(self, item: RolloutRequest) -> object:
        batch = super().get_batch(item)
        if item.global_step == 1:
            batch.rollout_logprobs.view(torch.int32)[-1] ^= 1
        return batch


def test_verify_names_the_row_the_field_the_position_and_both_values(tmp_path: Path) -> None:
    dump(tmp_path)
    scheduler = build_scheduler(config(tmp_path, "verify"), OneBitOff, make_contract())
    play(scheduler, [0])
    with pytest.raises(ContractError) as caught:
        scheduler.get_batch(request(1))
    recorded = batch_of(request(1))
    last = float(recorded.rollout_logprobs[-1])
    message = str(caught.value)
    path = f"{tmp_path}/x/train/step_000001.safetensors"
    assert message.startswith(f"[Rollout Mock] train step 1 was not played as it is recorded in {path}:\n")
    assert str(recorded.identities[-1]) in message
    assert "rollout_logprobs" in message
    assert f"{last:.9g}"[:7] in message
    assert message.endswith("\nrollout_mock.on_difference=warn goes on with what was played.")
    assert scheduler.state_dict()["last_steps"] == {"train": 0}
    play(scheduler, [2])


def test_verify_warns_and_goes_on_where_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(tmp_path)
    settings = config(tmp_path, "verify", on_difference="warn")
    scheduler = build_scheduler(settings, OneBitOff, make_contract(), plan=requests(range(3)))
    played = play(scheduler, range(3))
    assert not played[1].is_identical(batch_of(request(1)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "train step 1 was not played as it is recorded" in warning
    assert scheduler.ledger.as_dict()["recording"] == {"verified_steps": 2, "different_steps": 1}


def test_only_mocked_and_verified_steps_need_to_be_recorded(tmp_path: Path) -> None:
    dump(tmp_path, [0, 1])
    schedule = [{"mode": "mock", "steps": "0"}, {"mode": "verify", "steps": "1"}]
    settings = config(tmp_path, "real", schedule=schedule)
    build_scheduler(settings, never, make_contract(), plan=requests(range(9)))


def test_a_run_that_is_not_enabled_ignores_the_schedule(tmp_path: Path) -> None:
    settings = RolloutMockConfig(
        enable=False, dump_dir=str(tmp_path / "none"), schedule=[{"mode": "mock", "steps": "0"}], mode="real"
    )
    scheduler = build_scheduler(settings, Player, make_contract())
    play(scheduler, [0])
    assert scheduler.ledger.as_dict()["called"]["get_batch"] == 1
    assert not (tmp_path / "none").exists()


def test_verify_finds_another_scheduler_state_behind_equal_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the batches were compared: a data loader that stood elsewhere was found at the next difference, or never."""
    dump(tmp_path, [0])

    def ahead() -> Player:
        player = Player()
        player.cursor = 98
        return player

    with pytest.raises(ContractError) as caught:
        build_scheduler(config(tmp_path, "verify"), ahead, make_contract()).get_batch(request(0))
    assert str(caught.value) == (
        "[Rollout Mock] train step 0 was not played as it is recorded in "
        f"{tmp_path}/x/train/step_000000.safetensors:\n"
        'scheduler_state: recorded {"cursor":1}, played {"cursor":99}\n'
        "rollout_mock.on_difference=warn goes on with what was played."
    )
    warned = build_scheduler(config(tmp_path, "verify", on_difference="warn"), ahead, make_contract())
    assert warned.get_batch(request(0)).is_identical(batch_of(request(0)))
    assert 'scheduler_state: recorded {"cursor":1}, played {"cursor":99}' in caplog.text
    assert warned.ledger.as_dict()["recording"] == {"different_steps": 1}
    with pytest.raises(RecordingError, match="was recorded with policy version 0; the run asks for policy version 5"):
        build_scheduler(config(tmp_path, "verify"), Player, make_contract()).get_batch(request(0, policy_version=5))


def test_a_rank_that_does_not_write_waits_for_the_writers_step_and_says_what_is_missing(tmp_path: Path) -> None:
    """The recording's manifest was read again at every look; it is opened once, when it is there."""
    schedule = [{"mode": "cache", "steps": "0"}]
    settings = config(tmp_path, "mock", missing_step="repeat", schedule=schedule)
    plan = requests(range(2))
    writer = build_scheduler(settings, Player, make_contract(), plan=plan)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            writer.get_batch(plan[0])
            writer.state_dict()

    def other(timeout_s: float) -> ProxyScheduler:
        patience = Patience(timeout_s=timeout_s, clock=lambda: sum(pauses), sleep=sleep)
        scheduler = build_scheduler(settings, Player, make_contract(), plan=plan, is_writer=False, patience=patience)
        scheduler.get_batch(plan[0])
        return scheduler

    with pytest.raises(StepNotFoundError, match="Recording not found"):
        other(0.01).get_batch(plan[1])
    assert len(pauses) == 1
    assert other(60.0).get_batch(plan[1]).is_identical(batch_of(plan[0]))
    assert len(pauses) == 3
    writer.close()
