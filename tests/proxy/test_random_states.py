"""What a trainer draws after a replayed rollout is what it drew after the live one."""

import asyncio
import base64
import logging
import random
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ContractError, RecordingError
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo, moved_elsewhere
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.proxy.players import Player, batch_of, config, dump, mock, request
from tests.recording.builders import make_contract


def draw() -> tuple[float, float, float]:
    """What a trainer draws, from each global generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.gauss()


def seed(number: int = 5) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


class Drawing:
    """A real scheduler that moves the generators in ``moved``, when it is built and when it plays."""

    moved = ("numpy", "python", "torch")

    def __init__(self, moved: tuple[str, ...] | None = None, extra: int = 0) -> None:
        self.moved = self.moved if moved is None else moved
        self.extra = extra
        self._draw(3)

    def _draw(self, n: int) -> None:
        for _ in range(n + self.extra):
            if "torch" in self.moved:
                torch.randn(7)
            if "numpy" in self.moved:
                np.random.standard_normal()
            if "python" in self.moved:
                random.gauss()

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        self._draw(1 + request.global_step)
        return batch_of(request)


def run(tmp_path: Path, mode: str, make_real: Any = Drawing, steps: int = 3, **changes: Any) -> list[Any]:
    """The draws of a trainer around each step."""
    seed()
    options = changes.pop("options", {})
    with build_scheduler(config(tmp_path, mode, **changes), make_real, make_contract(), **options) as scheduler:
        drawn = []
        for step in range(steps):
            drawn.append(draw())
            scheduler.get_batch(request(step))
            drawn.append(draw())
    return drawn


def recorded(tmp_path: Path, step: int = 0) -> Any:
    return RecordingReader(str(tmp_path / "x")).open_step(request(step)).info.random_states


def test_a_replay_puts_every_moved_generator_where_the_rollout_left_it(tmp_path: Path) -> None:
    live = run(tmp_path, "dump")
    assert run(tmp_path, "mock") == live
    assert run(tmp_path, "verify") == live
    assert run(tmp_path, "mock", random_states="none") != live
    assert sorted(recorded(tmp_path)) == ["numpy", "python", "torch"]


def test_a_generator_that_the_rollout_did_not_move_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path, "dump", lambda: Drawing(("numpy",)))
    assert sorted(recorded(tmp_path)) == ["numpy"]
    with mock(tmp_path) as scheduler:
        torch.manual_seed(99)
        before = torch.get_rng_state()
        scheduler.get_batch(request(0))
        assert torch.equal(torch.get_rng_state(), before)


def test_a_scheduler_that_draws_nothing_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    run(tmp_path / "a", "dump", lambda: Drawing(()))
    run(tmp_path / "b", "dump", lambda: Drawing(()), random_states="none")
    assert recorded(tmp_path / "a") is None
    paths = [tmp_path / name / "x" / "train" / "step_000000.safetensors" for name in ("a", "b")]
    run_ids = [RecordingReader(str(tmp_path / name / "x")).manifest.run_id.encode() for name in ("a", "b")]
    contents = [len(path.read_bytes()) for path in paths]
    assert contents[0] == contents[1]
    assert b"random_states" not in paths[0].read_bytes()
    assert run_ids[0] != run_ids[1]


def test_all_states_are_asked_for_by_name_and_one_without_them_is_refused(tmp_path: Path) -> None:
    live = run(tmp_path, "dump", lambda: Drawing(()), random_states="all")
    assert sorted(recorded(tmp_path)) == ["numpy", "python", "torch"]
    assert run(tmp_path, "mock", random_states="all") == live
    dump(tmp_path / "old")
    with pytest.raises(RecordingError) as caught:
        run(tmp_path / "old", "mock", random_states="all")
    assert "was recorded without the states of the random generators numpy, python, torch" in str(caught.value)
    assert "random_states=moved" in str(caught.value)


def test_verify_finds_a_rollout_that_left_a_generator_elsewhere(tmp_path: Path) -> None:
    run(tmp_path, "dump", lambda: Drawing(("torch",)))
    with pytest.raises(ContractError, match="the rollout left the random generator 'torch' elsewhere") as caught:
        run(tmp_path, "verify", lambda: Drawing(("torch",), extra=1))
    assert "what is drawn next differs" in str(caught.value)


def test_a_generator_that_stood_elsewhere_before_says_nothing_about_the_rollout() -> None:
    first, other = {"python": ("a", "x")}, {"python": ("b", "y")}
    assert moved_elsewhere(first, other) == []
    assert moved_elsewhere(first, {"python": ("a", "y")}) == ["python"]
    assert moved_elsewhere(None, first) == []


def test_a_step_in_the_place_of_another_sets_nothing(tmp_path: Path) -> None:
    run(tmp_path, "dump", steps=1)
    seed()
    draw()
    with mock_of_missing(tmp_path) as scheduler:
        scheduler.get_batch(request(0))
        draw()
        expected = torch.get_rng_state()
        scheduler.get_batch(request(1))
    assert torch.equal(torch.get_rng_state(), expected)


def mock_of_missing(tmp_path: Path) -> Any:
    return build_scheduler(config(tmp_path, "mock", missing_step="repeat"), Drawing, make_contract())


def test_another_process_sets_the_states_only_where_its_generator_stood_where_the_writers_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = run(tmp_path, "dump", steps=1)
    # The same seed, as the ranks of one tensor-parallel group have: the same draws before, and so after.
    assert run(tmp_path, "mock", steps=1, options={"is_writer": False}) == live
    with build_scheduler(config(tmp_path, "mock"), Drawing, make_contract(), is_writer=False) as scheduler:
        seed(77)
        before = torch.get_rng_state()
        scheduler.get_batch(request(0))
        assert torch.equal(torch.get_rng_state(), before)
    # It does not warn: one process of the run does.
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_each_row_shard_has_the_states_of_its_own_process(tmp_path: Path) -> None:
    class Half(Drawing):
        def __init__(self, index: int) -> None:
            self.index = index
            super().__init__(extra=index)

        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            whole = super().get_batch(request)
            return replace(whole.select([2 * self.index, 2 * self.index + 1]), group_size=2)

    def play(mode: str) -> list[Any]:
        shards = [RowShard(index=index, count=2) for index in range(2)]
        schedulers = [
            build_scheduler(
                config(tmp_path, mode, background=False),
                lambda shard=shard: Half(shard.index),
                make_contract(),
                shard=shard,
                run_id="r",
            )
            for shard in shards
        ]
        drawn = []
        for scheduler in reversed(schedulers):  # the committer waits for the others
            seed()
            scheduler.get_batch(request(0))
            drawn.append(draw())
        for scheduler in schedulers:
            scheduler.close()
        return drawn

    live = play("dump")
    assert live[0] != live[1]
    assert play("mock") == live


def test_calls_of_an_asynchronous_trainer_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    async def play(folder: Path, mode: str, **changes: Any) -> Any:
        seed()
        scheduler = build_async_scheduler(config(folder, mode, **changes), Drawing, make_contract())
        async with scheduler:
            await scheduler.get_batch(request(0))
            return draw()

    asyncio.run(play(tmp_path / "a", "dump"))
    assert recorded(tmp_path / "a") is None
    live = asyncio.run(play(tmp_path / "b", "dump", random_states="moved"))
    assert sorted(recorded(tmp_path / "b")) == ["numpy", "python", "torch"]
    assert asyncio.run(play(tmp_path / "b", "mock")) == live


def test_calls_in_flight_at_one_time_are_left_out(tmp_path: Path) -> None:
    async def play() -> None:
        entered = asyncio.Event()

        class Waiting:
            async def get_batch(self, asked: RolloutRequest) -> RolloutBatch:
                if asked.global_step == 0:
                    await entered.wait()
                entered.set()
                torch.rand(3)
                return batch_of(asked)

        settings = config(tmp_path, "dump", random_states="moved")
        async with build_async_scheduler(settings, Waiting, make_contract()) as scheduler:
            await asyncio.gather(scheduler.get_batch(request(0)), scheduler.get_batch(request(1)))
            await scheduler.get_batch(request(2))

    asyncio.run(play())
    assert [recorded(tmp_path, step) is None for step in range(3)] == [True, True, False]


def test_calls_from_another_thread_than_the_main_one_are_left_out(tmp_path: Path) -> None:
    thread = threading.Thread(target=run, args=(tmp_path, "dump"))
    thread.start()
    thread.join()
    assert recorded(tmp_path) is None


def test_a_rollout_beside_one_of_another_thread_is_left_out(tmp_path: Path) -> None:
    entered, left = threading.Event(), threading.Event()

    class Quiet(Player):
        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            entered.set()
            assert left.wait(60)
            return super().get_batch(request)

    class Moving(Player):
        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            assert entered.wait(60)
            torch.rand(3)
            left.set()
            return super().get_batch(request)

    with (
        build_scheduler(config(tmp_path / "a", "dump"), Quiet, make_contract()) as quiet,
        build_scheduler(config(tmp_path / "b", "dump"), Moving, make_contract()) as moving,
    ):
        thread = threading.Thread(target=moving.get_batch, args=(request(0),))
        thread.start()
        quiet.get_batch(request(0))
        thread.join()
    assert recorded(tmp_path / "a") is None


def forged(position: int) -> str:
    """A state of NumPy's generator at a position that it does not have, which NumPy would take."""
    return base64.b64encode(struct.pack("<624IIId", *[0] * 624, position, 0, 0.0)).decode()


def test_a_state_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, "dump", steps=1)
    path = tmp_path / "x" / "train" / "step_000000.safetensors"
    from mock_scheduler.recording.step.step_file import decode_step, encode_step

    batch, info = decode_step(path.read_bytes())
    for states, problem in (
        ({"torch": ("d", "AAAA")}, "the recorded state cannot be set in the random generator 'torch'"),
        ({"python": ("d", "AAAA")}, "the recorded state cannot be set in the random generator 'python'"),
        ({"numpy": ("d", forged(625))}, "position is 625; expected at most 624"),
        ({"numpy": ("d", forged(2**32 - 1))}, "position is 4294967295; expected at most 624"),
        ({"torch": ("d", "?")}, "the state of the random generator 'torch' is no base64"),
        ({"cosmic": ("d", "AAAA")}, r"has the states of random generators \['cosmic'\]; known are"),
    ):
        path.write_bytes(encode_step(batch, replace(info, random_states=states)).to_bytes())
        with pytest.raises(RecordingError, match=problem):
            run(tmp_path, "mock", steps=1)


def test_states_of_another_form_are_no_info() -> None:
    values: dict[str, Any] = {"step": 0, "mode": "train", "scheduler_id": "d", "run_id": "r", "policy_version": 0}
    with pytest.raises(RecordingError, match=r"random_states.torch is 3; expected \(digest, state\) as text"):
        StepInfo(**values, random_states={"torch": 3})
    info = StepInfo(**values, random_states={"torch": ("a", "b")})
    assert StepInfo.from_json(info.as_json()) == info
