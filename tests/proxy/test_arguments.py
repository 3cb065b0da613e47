"""What a trainer gives by mistake is refused at once, by name, before anything is built or written."""

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

from mock_scheduler.errors import ConfigError, RecordingError, SchedulerError
from mock_scheduler.proxy.access import format_megabytes
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.proxy.settings import BuildOptions, ProxySettings
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.proxy.players import Player, config, dump, mock, never, play, request
from tests.recording.builders import make_contract


def open_dump(tmp_path: Path, **options: object) -> ProxyScheduler:
    return build_scheduler(config(tmp_path, "dump"), Player, make_contract(), **options)


@pytest.mark.parametrize(
    ("run_id", "problem"),
    [
        (3, "run_id is 3; expected a text of 1 to 128 printable characters: give it as text, '3'"),
        ("", "run_id is ''; expected a text of 1 to 128 printable characters"),
        ("a\nb", "run_id is 'a\\nb'; expected a text of 1 to 128 printable characters"),
        (True, "run_id is True; expected a text of 1 to 128 printable characters"),
    ],
)
@pytest.mark.parametrize("mode", ["dump", "mock"])
def test_a_run_id_that_is_no_short_text_is_refused(tmp_path: Path, run_id: object, problem: str, mode: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        build_scheduler(config(tmp_path, mode), never, make_contract(), run_id=run_id)
    assert str(caught.value) == problem
    assert os.listdir(tmp_path) == []


def test_a_run_id_of_128_characters_is_the_longest(tmp_path: Path) -> None:
    dump(tmp_path, run_id="x" * 128)
    assert RecordingReader(str(tmp_path / "x")).manifest.run_id == "x" * 128
    with pytest.raises(SchedulerError, match="run_id is 'xxx"):
        dump(tmp_path, run_id="x" * 129)


@pytest.mark.parametrize("mode", ["dump", "cache"])
def test_a_shard_that_is_recorded_needs_a_run_id(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(config(tmp_path, mode), never, make_contract(), shard=RowShard(index=0, count=2))
    assert str(caught.value) == (
        f"shard needs run_id, the same on every rank, where the run records (mode {mode}): give "
        "build_scheduler(run_id=...), for example the name of the run, or a uuid that rank 0 sends to all"
    )


def test_a_scheduler_in_place_of_its_builder_is_refused(tmp_path: Path) -> None:
    for build in (build_scheduler, build_async_scheduler):
        with pytest.raises(ConfigError) as caught:
            build(config(tmp_path, "dump"), Player(), make_contract())
        assert str(caught.value) == (
            "make_real must be a callable that builds the scheduler, found a Player; pass Player or lambda: scheduler"
        )
    with pytest.raises(ConfigError) as caught:
        build_scheduler(config(tmp_path, "dump"), 3, make_contract())
    assert str(caught.value) == (
        "make_real must be a callable that builds the scheduler, found an int; pass a class or a function"
    )


@pytest.mark.parametrize("contract", [["model"], "model", None])
def test_a_contract_of_another_kind_is_refused(tmp_path: Path, contract: object) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(config(tmp_path, "dump"), never, contract)
    assert str(caught.value) == (
        f"contract must be a Contract, or a mapping of names to values that must match, found {contract!r}"
    )


def test_a_plan_or_request_of_another_kind_is_refused(tmp_path: Path) -> None:
    for plan, problem in (
        (3, "plan is 3; expected a list of RolloutRequest"),
        ([request(0), 1], "plan[1] is 1; expected a RolloutRequest"),
    ):
        with pytest.raises(SchedulerError) as caught:
            open_dump(tmp_path, plan=plan)
        assert str(caught.value) == problem
    with open_dump(tmp_path, plan=None) as scheduler, pytest.raises(SchedulerError) as caught:
        scheduler.get_batch(3)
    assert str(caught.value) == "get_batch: request is 3; expected a RolloutRequest"


def test_numbers_of_numpy_and_torch_are_recorded_and_replayed(tmp_path: Path) -> None:
    asked = RolloutRequest(global_step=np.int64(3), batch_size=torch.tensor(4), policy_version=torch.tensor(2))
    with open_dump(tmp_path) as scheduler:
        scheduler.update_weights(np.int32(2))
        scheduler.get_batch(asked)
        scheduler.checkpoint_saved(torch.tensor(4))
        assert scheduler.state_dict()["policy_version"] == 2
    mock(tmp_path).get_batch(RolloutRequest(global_step=3, batch_size=4, policy_version=2))
    for version in (True, "x", 1.0, -1):
        with pytest.raises(SchedulerError, match=r"update_weights: policy_version is .*; expected a whole number"):
            mock(tmp_path).update_weights(version)


@pytest.mark.parametrize("next_step", ["x", -1, 1.5, True, None])
def test_a_checkpoint_step_that_is_no_step_is_refused(tmp_path: Path, next_step: object) -> None:
    with open_dump(tmp_path) as scheduler, pytest.raises(SchedulerError) as caught:
        scheduler.checkpoint_saved(next_step)
    assert str(caught.value) == (f"checkpoint_saved: next_step is {next_step!r}; expected a whole number of at least 0")


def test_a_checkpoint_beyond_what_was_played_is_refused_and_nothing_is_noted(tmp_path: Path) -> None:
    settings = config(tmp_path, "dump", retention={"keep_last": 1})
    with build_scheduler(settings, Player, make_contract()) as scheduler:
        play(scheduler, range(2))
        with pytest.raises(SchedulerError) as caught:
            scheduler.checkpoint_saved(3)
        assert str(caught.value) == (
            "checkpoint_saved: next_step is 3; expected at most 2, the step after the last one that was played, train "
            "step 1: a checkpoint cannot continue later"
        )
        assert not (tmp_path / "x/retention.json").exists()
        scheduler.checkpoint_saved(2)
        assert (tmp_path / "x/retention.json").exists()


def test_a_scheduler_that_plays_seldom_is_told_of_the_checkpoints_of_its_run(tmp_path: Path) -> None:
    settings = config(tmp_path, "dump", retention={"keep_last": 1})
    often, seldom = (build_scheduler(settings, Player, make_contract(), run_id="r") for _ in range(2))
    with often, seldom:
        seldom.get_batch(request(0, scheduler_id="math"))
        play(often, range(4))
        often.state_dict()
        seldom.checkpoint_saved(4)
        with pytest.raises(SchedulerError, match="next_step is 5; expected at most 4"):
            seldom.checkpoint_saved(5)


def test_a_step_that_is_asked_for_twice_is_refused_before_it_is_played(tmp_path: Path) -> None:
    with open_dump(tmp_path) as scheduler:
        scheduler.get_batch(request(0))
        state = scheduler.state_dict()
        with pytest.raises(SchedulerError) as caught:
            scheduler.get_batch(request(0))
        assert str(caught.value) == ("train step 0 was already recorded by this run: get_batch was called twice for it")
        assert scheduler.ledger.as_dict()["called"]["get_batch"] == 1
        scheduler.get_batch(request(0, mode="val"))
        scheduler.load_state_dict(state)
        scheduler.get_batch(request(1))


def test_a_second_run_is_refused_before_it_builds_anything_and_leaves_nothing(tmp_path: Path) -> None:
    first = open_dump(tmp_path, run_id="r")
    with pytest.raises(RecordingError, match=r"\[Rollout Mock\].*must be given one run_id"):
        build_scheduler(config(tmp_path, "dump"), never, make_contract())
    second = open_dump(tmp_path, run_id="r")  # another scheduler of the same run
    first.get_batch(request(0))
    second.get_batch(request(0, scheduler_id="math"))
    first.close()
    second.close()
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0], "train.math": [0]}
    assert sorted(os.listdir(tmp_path / "x")) == ["recording.json", "train", "train.math"]


def test_a_run_that_fails_before_its_first_step_leaves_no_recording(tmp_path: Path) -> None:
    open_dump(tmp_path).close()
    assert os.listdir(tmp_path / "x") == []


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(5138, "0.0049MB"), (1, "0.00000095MB"), (2**20, "1.00MB"), (104858, "0.10MB"), (50_000, "0.048MB")],
)
def test_a_small_size_is_not_nothing(size_bytes: int, text: str) -> None:
    assert format_megabytes(size_bytes) == text


def test_the_options_are_exactly_the_optional_settings_with_their_types() -> None:
    optional = {f.name for f in fields(ProxySettings) if f.default is not MISSING or f.default_factory is not MISSING}
    settings = get_type_hints(ProxySettings)
    assert get_type_hints(BuildOptions) == {name: settings[name] for name in optional}
    assert BuildOptions.__optional_keys__ == optional
