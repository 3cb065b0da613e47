"""The rollout mock and real Ray: a scheduler that is an actor, a proxy within one, and batches through its store."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler import (
    RolloutBatch,
    RolloutRequest,
    SchedulerError,
    StepNotFoundError,
    build_async_scheduler,
    build_scheduler,
)
from mock_scheduler.adapters.ray import ActorScheduler, AsyncActorScheduler, as_scheduler, in_place
from mock_scheduler.batch import SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.recording.reading.reader import RecordingReader
from tests.integrations.ray_head import ROOT, start_head
from tests.proxy.players import AsyncPlayer, Player, batch_of, request

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

CONTRACT = {"tokenizer": "toy"}


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Ray, connected to a cluster."""
    with start_head() as head, pytest.MonkeyPatch.context() as patch:
        for name, value in head.environ.items():  # some are read as Ray is imported
            patch.setenv(name, value)
        ray = pytest.importorskip("ray")
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        yield ray
        ray.shutdown()


def start(ray: Any, kind: type, *arguments: object, **options: object) -> Any:
    return ray.remote(kind).options(num_cpus=0.5, **options).remote(*arguments)


def section(folder: Path | str, mode: str) -> dict[str, object]:
    return {"enable": True, "mode": mode, "dump_dir": str(folder)}


class ActorPlayer(Player):
    """As an actor, which tells its calls."""

    def told(self) -> list[object]:
        return self.calls


class AsyncActorPlayer(AsyncPlayer):
    """Its calls run at the same time, in any number."""

    async def told(self) -> list[object]:
        return self.player.calls


def test_an_actors_handle_is_a_real_scheduler(ray: Any, tmp_path: Path) -> None:
    handle = start(ray, ActorPlayer)
    with build_scheduler(section(tmp_path / "x", "dump"), lambda: handle, CONTRACT) as scheduler:
        played = [scheduler.get_batch(request(0))]
        scheduler.suspend()
        scheduler.update_weights(1)
        scheduler.resume()
        played.append(scheduler.get_batch(request(1)))
        assert scheduler.collect_metrics() == {"time/rollout_s": 0.25, "batches": 2.0}
        assert scheduler.state_dict()["scheduler"] == {"cursor": 2}
    assert [batch.digest() for batch in played] == [batch_of(request(step)).digest() for step in range(2)]
    steps = ("get_batch", "train", 0), "suspend", ("update_weights", 1), "resume", ("get_batch", "train", 1), "close"
    assert ray.get(handle.told.remote()) == list(steps)
    with build_scheduler(section(tmp_path / "x", "mock"), lambda: handle, CONTRACT) as scheduler:
        assert [scheduler.get_batch(request(step)).digest() for step in range(2)] == [one.digest() for one in played]
    assert len(ray.get(handle.told.remote())) == len(steps)


@pytest.mark.parametrize("kind", [ActorPlayer, AsyncActorPlayer])
def test_it_is_one_in_an_asynchronous_loop(ray: Any, tmp_path: Path, kind: type) -> None:
    """A synchronous actor is asked by one caller at a time: each step has its own metrics."""
    handle = start(ray, kind)
    assert type(as_scheduler(handle)) is (AsyncActorScheduler if kind is AsyncActorPlayer else ActorScheduler)

    async def loop() -> list[str]:
        async with build_async_scheduler(section(tmp_path / "x", "dump"), lambda: handle, CONTRACT) as scheduler:
            return [one.digest() for one in await asyncio.gather(*(scheduler.get_batch(request(s)) for s in range(4)))]

    assert asyncio.run(loop()) == [batch_of(request(step)).digest() for step in range(4)]
    reader = RecordingReader(str(tmp_path / "x"))
    infos = [reader.open_step(request(step)).info for step in range(4)]
    numbers = [int(info.metrics["batches"]) for info in infos]
    assert [info.scheduler_state["cursor"] for info in infos] == numbers
    if kind is ActorPlayer:
        assert sorted(numbers) == [1, 2, 3, 4]


class Failing:
    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        raise StepNotFoundError(f"no step {request.global_step} in s3://user:password@bucket")


class Calling:
    """An actor that asks another one."""

    def __init__(self, handle: object) -> None:
        self._scheduler = ActorScheduler(handle)

    def get_batch(self, request: RolloutRequest) -> object:
        return self._scheduler.get_batch(request)


class NoScheduler:
    def play(self) -> None: ...


def test_an_error_of_the_actor_is_raised_as_it_was(ray: Any) -> None:
    """Through two actors as well; Ray's own class is both, and its text a report."""
    failing = start(ray, Failing)
    for handle in (failing, start(ray, Calling, failing)):
        scheduler = build_scheduler({"enable": False}, lambda handle=handle: handle, CONTRACT)
        with scheduler, pytest.raises(StepNotFoundError) as caught:
            scheduler.get_batch(request(7))
        assert type(caught.value) is StepNotFoundError
        assert str(caught.value) == "no step 7 in s3://user:***@bucket"
        assert "Failing.get_batch()" in str(caught.value.__cause__)
    with pytest.raises(StepNotFoundError, match="no step 7"):
        ray.get(failing.get_batch.remote(request(7)))

    async def ask() -> None:
        await AsyncActorScheduler(failing).get_batch(request(8))

    with pytest.raises(StepNotFoundError, match=r"^no step 8 in"):
        asyncio.run(ask())
    ray.kill(failing)
    with pytest.raises(ray.exceptions.RayActorError):
        ActorScheduler(failing).get_batch(request(7))
    with pytest.raises(SchedulerError, match=r"its class has no method get_batch"):
        as_scheduler(start(ray, NoScheduler))


class Rollouts:
    """A proxy within an actor."""

    def __init__(self, values: Mapping[str, object], run_id: str | None = None) -> None:
        self._player = Player()
        self._scheduler = build_scheduler(values, lambda: self._player, CONTRACT, run_id=run_id)

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        return self._scheduler.get_batch(request)

    def update_weights(self, policy_version: int) -> None:
        self._scheduler.update_weights(policy_version)

    def state_dict(self) -> dict[str, object]:
        return dict(self._scheduler.state_dict())

    def close(self) -> None:
        self._scheduler.close()

    def told(self) -> tuple[int, list[object], str]:
        return os.getpid(), self._player.calls, os.getcwd()


class AsyncRollouts:
    def __init__(self, values: Mapping[str, object]) -> None:
        self._scheduler = build_async_scheduler(values, AsyncPlayer, CONTRACT)

    async def get_batch(self, request: RolloutRequest) -> object:
        return await self._scheduler.get_batch(request)

    async def close(self) -> None:
        await self._scheduler.close()


@pytest.mark.parametrize("kind", [Rollouts, AsyncRollouts])
def test_a_proxy_within_an_actor_records_and_replays(ray: Any, tmp_path: Path, kind: type) -> None:
    for mode in ("dump", "mock"):
        handle = start(ray, kind, section(tmp_path / "x", mode))
        found = ray.get([handle.get_batch.remote(request(step)) for step in range(3)])
        assert [batch.digest() for batch in found] == [batch_of(request(step)).digest() for step in range(3)]
        if mode == "mock":
            with pytest.raises(StepNotFoundError, match=r"^\[Rollout Mock\] Mock file not found: .*step_000009"):
                ActorScheduler(handle).get_batch(request(9))
        ray.get(handle.close.remote())


def test_a_relative_folder_is_the_drivers_whatever_directory_the_actor_has(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives an actor the directory where its node was started, or a copy of files that it removes at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.txt").touch()
    files = shutil.make_archive(str(tmp_path / "files"), "zip", tmp_path / "files")
    for number, environment in enumerate(({}, {"working_dir": f"file://{files}"})):
        environment = {"env_vars": {"PYTHONPATH": str(ROOT)}, **environment}
        handle = start(ray, Rollouts, section(f"dumps/{number}", "dump"), runtime_env=environment)
        ray.get(handle.get_batch.remote(request(0)))
        ray.get(handle.close.remote())
        assert Path(ray.get(handle.told.remote())[2]) != tmp_path
    assert sorted(path.parent.parent.name for path in tmp_path.glob("dumps/*/train/*.safetensors")) == ["0", "1"]


def patiently(call: Callable[[], Any]) -> Any:
    """A call to an actor that is being started again."""
    import ray

    ends_s = time.monotonic() + 120
    while True:
        try:
            return call()
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < ends_s
            time.sleep(0.2)


def test_an_actor_that_ray_starts_again_goes_on_by_itself(ray: Any, tmp_path: Path) -> None:
    handle = start(ray, Rollouts, section(tmp_path / "x", "dump"), max_restarts=2)
    scheduler: Any = ActorScheduler(handle)
    digests = [scheduler.get_batch(request(step)).digest() for step in range(2)]
    assert scheduler.state_dict()["scheduler"] == {"cursor": 2}  # both are on the disk
    killed = ray.get(handle.told.remote())[0]
    os.kill(killed, signal.SIGKILL)
    digests += [patiently(lambda step=step: scheduler.get_batch(request(step))).digest() for step in (1, 2, 3)]
    process_id, calls, _ = ray.get(handle.told.remote())
    assert process_id != killed
    assert calls == [
        ("load_state_dict", {"cursor": 2}),
        ("update_weights", 2),
        ("get_batch", "train", 2),
        ("get_batch", "train", 3),
    ]
    scheduler.close()
    assert digests == [batch_of(request(step)).digest() for step in (0, 1, 1, 2, 3)]
    reader = RecordingReader(str(tmp_path / "x"))
    assert reader.steps() == {"train": [0, 1, 2, 3]}
    assert reader.manifest.run_id == f"ray-actor-{handle._ray_actor_id.hex()}"


def test_several_actors_record_one_run(ray: Any, tmp_path: Path) -> None:
    values = section(tmp_path / "x", "dump")
    handles = {name: start(ray, Rollouts, values, "one-run") for name in ("math", "code")}
    asked = {name: handle.get_batch.remote(request(0, scheduler_id=name)) for name, handle in handles.items()}
    for name, answer in asked.items():
        assert ray.get(answer).is_identical(batch_of(request(0, scheduler_id=name)))
        ray.get(handles[name].close.remote())
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train.code": [0], "train.math": [0]}
    with pytest.raises(ray.exceptions.ActorDiedError, match="holds the recording of run id one-run"):
        ray.get(start(ray, Rollouts, values).told.remote())


def make_batch(num_rows: int, length: int) -> RolloutBatch:
    rows = [
        Trajectory(
            identity=SampleIdentity(scheduler_id="default", group_id=row, episode_id=0, env_id=0, turn=0),
            tokens=torch.full((length,), row, dtype=torch.int32),
            response_mask=torch.arange(length) > 0,
            rollout_logprobs=torch.full((length - 1,), -0.5),
            turn_rewards=torch.ones(1),
            policy_versions=torch.zeros(1, dtype=torch.int32),
            termination=Termination.TERMINATED,
            prompt_length=1,
            tag="toy",
            extras={"hidden": torch.full((length,), row, dtype=torch.bfloat16)},
        )
        for row in range(num_rows)
    ]
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=1)


class Reader:
    def write(self, batch: RolloutBatch) -> tuple[str, int]:
        """The digest, then what it wrote."""
        digest = batch.digest()
        batch.tokens[0] = 77
        return digest, int(batch.tokens[0])


def test_no_reader_of_a_batch_in_the_store_changes_it(ray: Any) -> None:
    batch = make_batch(64, 20_000)
    reference = ray.put(batch)
    readers = [start(ray, Reader) for _ in range(2)]
    for _ in range(2):
        found = ray.get([reader.write.remote(reference) for reader in readers])
        assert found == [(batch.digest(), 77)] * 2
    with in_place():
        shown = ray.get(reference)
    assert shown.is_identical(batch)
    own = ray.get(reference)
    own.tokens[0] = 99
    assert ray.get(reference).is_identical(batch)
    assert own.copy().tokens[0] == 99


def test_the_example_of_the_page_runs(ray: Any, tmp_path: Path) -> None:
    """Its second actor is killed, and goes on where it was."""
    block, _in_place = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::FutureWarning", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    batches = re.findall(r"^(dump|mock): 3 batches, (\w{8})$", said, re.MULTILINE)
    assert [mode for mode, _ in batches] == ["dump", "mock"]
    assert len({digest for _, digest in batches}) == 1
    assert re.findall(r"schedulers built: (\d)", said) == ["1", "0"]
    assert "went on with prompt 16: {'next_prompt': 32}" in said
    assert re.search(r"\(Rollouts pid=\d+\).* \[Rollout Mock\] Dumped step 1: " + re.escape(str(tmp_path)), said)
    assert "[Rollout Mock] Ray started this actor again: it goes on with its recording in" in said
    assert "refused: [Rollout Mock] Mock file not found" in said
    assert sorted(path.name for path in tmp_path.glob("dumps/*")) == ["before", "within"]
