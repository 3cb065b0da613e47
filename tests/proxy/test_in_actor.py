"""A proxy that is built in a Ray actor, whose facts a test gives; ``tests/integrations`` has real ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError, RecordingError, SchedulerError
from mock_scheduler.proxy import in_actor
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.proxy.in_actor import ActorPlace, find_actor, show_lines
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RowShard
from tests.proxy.players import AsyncPlayer, Player, batch_of, config, request
from tests.recording.builders import make_contract

PLACE = ActorPlace(actor_id="a" * 32, is_restarted=False, driver_dir="/driver")
Become = Callable[[ActorPlace], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Makes this process the given actor, from the next proxy on."""
    monkeypatch.setattr(in_actor, "show_lines", lambda: None)
    return lambda place: monkeypatch.setattr(in_actor, "find_actor", lambda: place)


def build(tmp_path: Path, player: object, mode: str = "dump", **options: object) -> ProxyScheduler:
    return build_scheduler(config(tmp_path, mode), lambda: player, make_contract(), **options)  # type: ignore[arg-type]


def die(scheduler: ProxyScheduler) -> None:
    """Ends a process as SIGKILL does, but for steps being written: they are on the disk."""
    scheduler._core._access.writer.close()  # type: ignore[union-attr]


def run_id(tmp_path: Path) -> str:
    return str(json.loads((tmp_path / "x" / "recording.json").read_text())["run_id"])


@pytest.fixture
def dead(tmp_path: Path, become: Become) -> Path:
    """Steps 0 and 1, recorded by an actor that died; another process is it now."""
    become(PLACE)
    scheduler = build(tmp_path, Player())
    for step in range(2):
        scheduler.get_batch(request(step))
        scheduler.update_weights(step + 1)
    die(scheduler)
    become(replace(PLACE, is_restarted=True))
    return tmp_path


def test_no_other_process_is_an_actor() -> None:
    assert find_actor() is None


def test_an_actor_records_under_its_own_id_unless_it_is_given_another(tmp_path: Path, become: Become) -> None:
    become(PLACE)
    for folder, options in ((tmp_path, {}), (tmp_path / "b", {"run_id": "mine"})):
        with build(folder, Player(), **options) as scheduler:
            scheduler.get_batch(request(0))
    assert run_id(tmp_path) == f"ray-actor-{PLACE.actor_id}"
    assert run_id(tmp_path / "b") == "mine"
    become(replace(PLACE, actor_id="b" * 32))
    with pytest.raises(RecordingError, match=f"holds the recording of run id ray-actor-{PLACE.actor_id}"):
        build(tmp_path, Player())
    with build(tmp_path, Player(), resume=True) as scheduler:  # as a user asks it to
        scheduler.get_batch(request(1))
    assert run_id(tmp_path) == f"ray-actor-{PLACE.actor_id}"


def test_a_restarted_actor_goes_on_where_it_was(dead: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its scheduler has the recorded state and the weights' version, of which only the dead one was told."""
    player = Player()
    with build(dead, player) as scheduler:
        assert scheduler.get_batch(request(2)).is_identical(batch_of(request(2)))
        scheduler.update_weights(3)
        scheduler.get_batch(request(3))
    assert player.calls == [
        ("load_state_dict", {"cursor": 2}),
        ("update_weights", 2),
        ("get_batch", "train", 2),
        ("update_weights", 3),
        ("get_batch", "train", 3),
        "close",
    ]
    assert [one.removeprefix("[Rollout Mock] ").partition(" in ")[0] for one in caplog.messages][:2] == [
        "Ray started this actor again: it goes on with its recording",
        "The real scheduler goes on from the state recorded with train step 1",
    ]
    replayed = build(dead, Player(), "mock")
    assert [replayed.get_batch(request(step)).digest() for step in range(4)] == [
        batch_of(request(step)).digest() for step in range(4)
    ]


def test_a_restarted_actor_answers_what_it_recorded_without_playing_it(dead: Path) -> None:
    """A call that Ray makes again may be for a step that is recorded, and an engine samples otherwise each time."""

    player = Player()
    with build(dead, player) as scheduler:
        assert scheduler.get_batch(request(1)).is_identical(batch_of(request(1)))
        assert player.calls == []
        scheduler.get_batch(request(2))
    assert player.calls[:2] == [("load_state_dict", {"cursor": 2}), ("update_weights", 2)]


def test_its_validations_come_between_its_steps(dead: Path) -> None:
    player = Player()
    with build(dead, player) as scheduler:
        scheduler.get_batch(request(2, mode="val"))
        scheduler.get_batch(request(2))
    assert player.calls[0] == ("load_state_dict", {"cursor": 2})
    assert player.cursor == 4


def test_its_checkpoint_has_what_the_dead_one_reached(dead: Path) -> None:
    with build(dead, Player()) as scheduler:
        state = scheduler.state_dict()
    assert state == {"mode": "cache", "policy_version": 1, "last_steps": {"train": 1}, "scheduler": {"cursor": 2}}


def test_a_checkpoint_that_is_loaded_counts_instead(dead: Path) -> None:
    player = Player()
    state = {"mode": "dump", "policy_version": 5, "last_steps": {"train": 4}, "scheduler": {"cursor": 40}}
    with build(dead, player) as scheduler:
        scheduler.load_state_dict(state)
        scheduler.get_batch(request(5))
    assert player.calls[0] == ("load_state_dict", {"cursor": 40})


def test_an_asynchronous_one_goes_on_as_well(dead: Path) -> None:
    player = AsyncPlayer()

    async def go_on() -> list[str]:
        async with build_async_scheduler(config(dead, "dump"), lambda: player, make_contract()) as scheduler:
            first = await scheduler.get_batch(request(1))
            others = await asyncio.gather(*(scheduler.get_batch(request(step)) for step in (2, 3)))
            return [one.digest() for one in (first, *others)]

    assert asyncio.run(go_on()) == [batch_of(request(step)).digest() for step in (1, 2, 3)]
    assert [call for call in player.player.calls if call[0] == "load_state_dict"] == [
        ("load_state_dict", {"cursor": 2})
    ]  # type: ignore[index]


def test_one_of_several_schedulers_takes_its_own_state(tmp_path: Path, become: Become) -> None:
    """Two actors with one run id: the state of the other is none of its business."""
    become(PLACE)
    schedulers = {name: build(tmp_path, Player(), run_id="both") for name in ("math", "code")}
    for name, scheduler in schedulers.items():
        for step in range(1 + (name == "code")):
            scheduler.get_batch(request(step, scheduler_id=name))
    for scheduler in schedulers.values():
        die(scheduler)
    become(replace(PLACE, is_restarted=True))
    player = Player()
    with build(tmp_path, player, run_id="both") as scheduler:
        with pytest.raises(SchedulerError, match=r"which of the schedulers in train\.code, train\.math it was"):
            scheduler.state_dict()
        scheduler.get_batch(request(1, scheduler_id="math"))
    assert player.calls[0] == ("load_state_dict", {"cursor": 1})


def test_what_a_restarted_actor_must_not_go_on_with_is_refused(dead: Path, become: Become) -> None:
    """Another's recording, since it may have died before it began its own; and a share of a step."""
    become(replace(PLACE, actor_id="c" * 32, is_restarted=True))
    with pytest.raises(RecordingError, match=f"holds the recording of run id ray-actor-{PLACE.actor_id}"):
        build(dead, Player())
    with pytest.raises(RecordingError, match="which records a row shard"):
        build(dead, Player(), run_id="x", shard=RowShard(index=0, count=2))


def test_an_actor_that_died_before_it_recorded_begins(tmp_path: Path, become: Become) -> None:
    become(replace(PLACE, is_restarted=True))
    player = Player()
    with build(tmp_path, player) as scheduler:
        scheduler.get_batch(request(0))
    assert player.calls == [("get_batch", "train", 0), "close"]
    assert run_id(tmp_path) == f"ray-actor-{PLACE.actor_id}"


def test_a_relative_folder_is_the_drivers(tmp_path: Path, become: Become, caplog: pytest.LogCaptureFixture) -> None:
    become(replace(PLACE, driver_dir=str(tmp_path)))
    values = {"enable": True, "mode": "dump", "dump_dir": "dumps/x"}
    with caplog.at_level(logging.INFO), build_scheduler(values, Player, make_contract()) as scheduler:
        scheduler.get_batch(request(0))
    assert (tmp_path / "dumps" / "x" / "train" / "step_000000.safetensors").is_file()
    assert f"[Rollout Mock] Rollout Mock enabled: mode=dump, dir={tmp_path}/dumps/x" in caplog.messages
    become(replace(PLACE, driver_dir=None))
    with pytest.raises(ConfigError, match=r"dump_dir 'dumps/x' is relative to the working directory of the program"):
        build_scheduler(values, Player, make_contract())
    assert replace(PLACE, driver_dir=None).locate("s3://bucket/x") == "s3://bucket/x"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The library's, whose level is restored as a level is set: loggers below remember what they print until then."""
    logger = logging.getLogger("mock_scheduler")
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_lines_are_shown_where_the_program_shows_none(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [])  # as in a program that has set up nothing
    monkeypatch.setattr(logger, "propagate", False)
    show_lines()
    show_lines()
    logging.getLogger("mock_scheduler.rollout_mock").info("a line")
    assert capsys.readouterr().err == "a line\n"
    own = logging.NullHandler()
    logger.handlers = [own]
    show_lines()
    assert logger.handlers == [own]
