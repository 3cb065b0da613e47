"""Values that a trainer computes after the rollout are recorded with the step, and given back in its replay."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.batch.columns import Ragged
from mock_scheduler.errors import BatchError, ContractError, RecordingError, SchedulerError
from mock_scheduler.proxy.access import RecordingAccess
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest
from tests.proxy.players import Player, batch_of, config, dump, never, request
from tests.recording.builders import make_contract

NAMES = ["rewards", "notes"]


def open_scheduler(tmp_path: Path, mode: str, names: Any = NAMES, **changes: Any) -> ProxyScheduler:
    make_real = never if mode == "mock" else Player
    return build_scheduler(config(tmp_path, mode, **changes), make_real, make_contract(), late_values=names)


def score(scheduler: ProxyScheduler, asked: RolloutRequest, *, shift: float = 0.0) -> list[Any]:
    """What a trainer does: compute where nothing is recorded."""
    found = scheduler.late_values(asked, "rewards")
    if found is not None:
        return [value.item() for value in found if isinstance(value, torch.Tensor)]
    values = [torch.tensor(index / 3 + shift, dtype=torch.float64) for index in range(4)]
    scheduler.add_late_values(asked, "rewards", values)
    scheduler.add_late_values(asked, "notes", [{"row": index} for index in range(4)])
    return [value.item() for value in values]


def play(scheduler: ProxyScheduler, steps: int = 2, **changes: Any) -> list[Any]:
    with scheduler:
        results = []
        for step in range(steps):
            batch = scheduler.get_batch(request(step))
            results.append((batch.digest(), score(scheduler, request(step), **changes)))
    return results


def test_they_are_recorded_and_given_back_and_the_batch_is_without_them(tmp_path: Path) -> None:
    live = play(open_scheduler(tmp_path, "dump"))
    scheduler = open_scheduler(tmp_path, "mock")
    assert play(scheduler) == live
    assert live[0][0] == batch_of(request(0)).digest()
    assert scheduler.ledger.as_dict()["answered"] == {"get_batch": 2, "late_values": 2}
    with open_scheduler(tmp_path, "mock") as again:
        again.get_batch(request(1))
        assert again.late_values(request(1), "notes") == [{"row": index} for index in range(4)]
        assert again.late_values(request(0), "notes") is None  # that of the last step is kept alone


def test_verify_compares_them(tmp_path: Path) -> None:
    live = play(open_scheduler(tmp_path, "dump"))
    assert play(open_scheduler(tmp_path, "verify")) == live
    with pytest.raises(ContractError, match="late/rewards"):
        play(open_scheduler(tmp_path, "verify"), shift=1e-9)


def test_a_run_that_computes_others_is_refused(tmp_path: Path) -> None:
    play(open_scheduler(tmp_path, "dump", ["rewards", "notes"]))
    with open_scheduler(tmp_path, "mock", ["rewards", "style"]) as scheduler, pytest.raises(RecordingError) as caught:
        scheduler.get_batch(request(0))
    assert "was recorded without the late values style" in str(caught.value)
    assert "(recorded: notes, rewards)" in str(caught.value)
    dump(tmp_path / "plain")
    with open_scheduler(tmp_path / "plain", "mock") as scheduler, pytest.raises(RecordingError, match="recorded: none"):
        scheduler.get_batch(request(0))


def test_a_step_that_lacks_one_is_not_recorded_and_the_next_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), open_scheduler(tmp_path, "dump") as scheduler:
        scheduler.get_batch(request(0))
        scheduler.add_late_values(request(0), "rewards", [0.5] * 4)
        for call in (lambda: scheduler.get_batch(request(1)), scheduler.state_dict):
            with pytest.raises(SchedulerError, match="train step 0 waits for its late values notes: give them with"):
                call()
    assert "close: train step 0 waits for its late values notes: it is not recorded" in caplog.text
    assert not (tmp_path / "x" / "train").exists()


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with open_scheduler(tmp_path, "dump") as scheduler:
        scheduler.get_batch(request(0))
        with pytest.raises(BatchError, match="3 late values 'rewards' were given; expected 4, one for each row"):
            scheduler.add_late_values(request(0), "rewards", [1, 2, 3])
        with pytest.raises(SchedulerError, match=r"late values 'x' are not known; known are \['rewards', 'notes'\]"):
            scheduler.add_late_values(request(0), "x", [1, 2, 3, 4])
        scheduler.add_late_values(request(0), "rewards", [Ragged(torch.ones(index)) for index in range(4)])
        with pytest.raises(SchedulerError, match="the late values 'rewards' were given already"):
            scheduler.add_late_values(request(0), "rewards", [1, 2, 3, 4])
        scheduler.add_late_values(request(0), "notes", ["a", "b", "c", "d"])
    with open_scheduler(tmp_path, "mock") as scheduler:
        scheduler.get_batch(request(0))
        with pytest.raises(SchedulerError, match="train step 0 was replayed: its values 'notes' are recorded"):
            scheduler.add_late_values(request(0), "notes", ["a", "b", "c", "d"])
    with pytest.raises(SchedulerError, match=r"late_values is \['a', 'a'\]; expected a list of different names"):
        open_scheduler(tmp_path, "mock", ["a", "a"])


def test_values_of_a_step_that_has_ended_are_refused(tmp_path: Path) -> None:
    with open_scheduler(tmp_path, "dump", ["r"]) as scheduler:
        for step in range(2):
            scheduler.get_batch(request(step))
            scheduler.add_late_values(request(step), "r", [1, 2, 3, 4])
        with pytest.raises(SchedulerError, match="train step 1: late values 'r' come too late: the step has them"):
            scheduler.add_late_values(request(1), "r", [1, 2, 3, 4])
    too_late = "train step 0: late values 'r' come too late: the step was replayed, and another step has been asked for"
    with open_scheduler(tmp_path, "mock", ["r"]) as scheduler:
        scheduler.get_batch(request(0))
        scheduler.get_batch(request(1))
        with pytest.raises(SchedulerError, match=too_late):
            scheduler.late_values(request(0), "r")
        with pytest.raises(SchedulerError, match=too_late):
            scheduler.add_late_values(request(0), "r", [1, 2, 3, 4])
        assert scheduler.late_values(request(1), "r") == [1, 2, 3, 4]


def test_a_step_whose_writing_failed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, failures = RecordingAccess.submit, [OSError("no space left")]

    def fail_once(*args: Any, **others: Any) -> None:
        if failures:
            raise failures.pop()
        submit(*args, **others)

    monkeypatch.setattr(RecordingAccess, "submit", fail_once)
    with open_scheduler(tmp_path, "dump", ["r"]) as scheduler:
        scheduler.get_batch(request(0))
        with pytest.raises(OSError, match="no space left"):
            scheduler.add_late_values(request(0), "r", [1, 2, 3, 4])
        with pytest.raises(SchedulerError, match="train step 0 was not written with its late values"):
            scheduler.get_batch(request(1))
        scheduler.add_late_values(request(0), "r", [1, 2, 3, 4])
    with open_scheduler(tmp_path, "mock", ["r"]) as scheduler:
        scheduler.get_batch(request(0))
        assert scheduler.late_values(request(0), "r") == [1, 2, 3, 4]


def test_where_nothing_is_recorded_nothing_is_kept(tmp_path: Path) -> None:
    with open_scheduler(tmp_path, "real") as scheduler:
        for step in range(2):
            scheduler.get_batch(request(step))
            assert scheduler.late_values(request(step), "rewards") is None
            scheduler.add_late_values(request(step), "rewards", [1, 2, 3, 4])


def test_an_asynchronous_loop_has_them_too(tmp_path: Path) -> None:
    async def loop(mode: str) -> Any:
        make_real = never if mode == "mock" else Player
        settings = config(tmp_path, mode)
        async with build_async_scheduler(settings, make_real, make_contract(), late_values=["r"]) as scheduler:
            await scheduler.get_batch(request(0))
            found = await scheduler.late_values(request(0), "r")
            if found is None:
                await scheduler.add_late_values(request(0), "r", [1, None, 3, 4])
            return found

    assert asyncio.run(loop("dump")) is None
    assert asyncio.run(loop("mock")) == [1, None, 3, 4]


def test_prompts_reach_the_real_scheduler_and_its_codec_judges_them(tmp_path: Path) -> None:
    seen: list[object] = []

    class Codec:
        def encode(self, native: Any, asked: RolloutRequest) -> Any:
            return native

        def decode(self, batch: Any) -> Any:
            return batch

        def prompt_problems(self, batch: Any, asked: RolloutRequest) -> list[str]:
            return [] if asked.prompts == ["a", "b"] else [f"prompts are {asked.prompts}; recorded are a, b"]

    class Seeing(Player):
        def get_batch(self, request: RolloutRequest) -> Any:
            seen.append(request.prompts)
            return super().get_batch(request)

    with build_scheduler(config(tmp_path, "dump"), Seeing, make_contract(), codec=Codec()) as scheduler:
        scheduler.get_batch(request(0, prompts=["a", "b"]))
    assert seen == [["a", "b"]]
    assert request(0, prompts=object()) == request(0)
    assert "prompts" not in repr(request(0, prompts="secret")).replace("prompt_digests", "")
    with build_scheduler(config(tmp_path, "mock"), never, make_contract(), codec=Codec()) as scheduler:
        with pytest.raises(BatchError, match="train step 0: prompts are c; recorded are a, b"):
            scheduler.get_batch(request(0, prompts="c"))
        scheduler.get_batch(request(0))


def test_generators_moved_by_what_computes_them_are_put_back_once_all_are_given_back(tmp_path: Path) -> None:
    def draws(mode: str, extra: int = 0) -> list[float]:
        torch.manual_seed(3)
        drawn = []
        with open_scheduler(tmp_path, mode) as scheduler:
            for step in range(2):
                scheduler.get_batch(request(step))
                drawn.append(torch.rand(()).item())  # between rollout and rewards, as by dropout
                for name in NAMES:
                    if scheduler.late_values(request(step), name) is None:
                        torch.rand(5 + extra)
                        scheduler.add_late_values(request(step), name, [1, 2, 3, 4])
                drawn.append(torch.rand(()).item())
        return drawn

    live = draws("dump")
    assert draws("mock") == live
    assert draws("verify") == live
    with pytest.raises(ContractError, match=r"late_random_states: .* 'torch' elsewhere than the recorded run did"):
        draws("verify", extra=1)
