"""Workers that are actors: one that dies at any call is replaced, and nobody sees it in an answer.

Ray is a stand-in here (``tests/pipelines/fake_ray.py``); ``tests/integrations/test_ray.py`` has the real one.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mock_scheduler.errors import ConfigError, SchedulerError
from pipelines.config.environments import EnvWorkersConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments import ray_actor
from pipelines.environments.base import ResetRequest
from pipelines.environments.ray_actor import EnvironmentActor, read_identity
from pipelines.environments.ray_cluster import check_cluster, connect, disconnect
from pipelines.environments.workers import EnvironmentPool
from tests.pipelines.environments.test_workers import CUSTOM_ENVS, open_pool, play, request, tokenizer_of
from tests.pipelines.fake_ray import Cluster, Strike, build_ray

#: What a run that connects sets in its own environment.
TURNED = (
    *("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"),
    "RAY_gcs_rpc_server_reconnect_timeout_s",
)


@pytest.fixture(autouse=True)
def _levels_of_this_process() -> Iterator[None]:
    """An actor sets the levels of its process's loggers, which is this one here."""
    names = [None, *logging.root.manager.loggerDict]
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name in [None, *logging.root.manager.loggerDict]:
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))


@pytest.fixture
def head() -> Iterator[socket.socket]:
    """Listens in the place of the cluster's head."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, head: socket.socket) -> Cluster:
    built = Cluster(address=f"127.0.0.1:{head.getsockname()[1]}")
    ray = build_ray(built)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    monkeypatch.setitem(sys.modules, "ray._private", ray._private)
    monkeypatch.delitem(sys.modules, "pipelines.environments.ray_workers", raising=False)
    monkeypatch.setattr(EnvironmentActor, "identify", lambda _: identity(built))
    for name in (*TURNED, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return built


def identity(cluster: Cluster) -> Any:
    own = read_identity()
    return replace(own, host="node-3", process_id=4711, versions={**own.versions, **cluster.versions})


def test_a_head_that_has_ended_ends_the_run_with_the_place_of_its_logs(
    cluster: Cluster, head: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new actor would be waited for until Ray ended the process."""
    monkeypatch.setattr("pipelines.environments.ray_cluster._BETWEEN_CHECKS_S", 0.0)
    cluster.strikes = {2: "before"}
    with open_actors(1) as pool:
        requests = [ResetRequest(slot=0, tag="Hard", seed=3, split="all")]
        pool.reset_many(requests)
        head.close()
        with pytest.raises(SchedulerError) as caught:
            pool.reset_many(requests)
    assert str(caught.value) == (
        f"env_workers: the head of the Ray cluster at {cluster.address} has ended ([Errno 111] Connection refused), "
        "and its actors with it. Why is in /tmp/ray/session/logs on the head's machine: gcs_server.out and raylet.out. "
        "Every step that the log calls Dumped is in the recording; start a cluster, and go on from the last checkpoint "
        "with resume_from_checkpoint. launch/ray.sh starts one on this machine for a run"
    )
    assert cluster.num_actors == 1


@contextmanager
def open_actors(num_workers: int) -> Iterator[EnvironmentPool]:
    workers = importlib.import_module("pipelines.environments.ray_workers")
    pool = EnvironmentPool(
        CUSTOM_ENVS,
        tokenizer_of("Hard", CUSTOM_ENVS),
        num_workers=num_workers,
        start=lambda *made: workers.RayWorker(*made, settings=EnvWorkersConfig(type="ray")),
    )
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_pool(0) as pool:
        return play(pool)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_answers_are_those_of_the_plain_pool(cluster: Cluster, expected: list[Any], num_workers: int) -> None:
    with open_actors(num_workers) as pool:
        assert play(pool) == expected
        assert pool.num_built == 5
        assert pool.process_ids == []
    assert cluster.num_actors == num_workers


@pytest.mark.parametrize("strike", ["before", "after"])
def test_an_actor_that_dies_at_whatever_call_changes_no_answer(
    cluster: Cluster, expected: list[Any], strike: Strike
) -> None:
    """Calls that replay an episode are struck too: the second death is one call after the first."""
    with open_actors(2) as pool:
        play(pool)
    num_calls = cluster.num_calls
    assert num_calls > 20
    for number in range(num_calls):
        cluster.num_calls, cluster.num_actors = 0, 0
        cluster.strikes = {number: strike, number + 2: strike}
        with open_actors(2) as pool:
            assert play(pool) == expected, number
            assert pool.num_built == 5
        assert cluster.num_actors >= 3


def test_a_death_is_told(cluster: Cluster, expected: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    cluster.strikes = {5: "before"}
    with open_actors(1) as pool:
        assert play(pool) == expected
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "[env workers] process 4711 of host node-3 died: the worker was killed; it is replaced",
        "[env workers] process 4711 of host node-3 has played 4 episodes again",
    ]


def test_a_call_that_every_actor_dies_of_is_named_with_its_episodes(cluster: Cluster) -> None:
    with open_actors(1) as pool:
        pool.reset_many([request(0, 30), request(1, 31)])
        # What each new actor is asked: who it is, to start both episodes, the call.
        first = cluster.num_calls
        cluster.strikes = {first: "before", first + 3: "after", first + 6: "before"}
        with pytest.raises(SchedulerError) as caught:
            pool.step_many([(1, [2])])
        assert str(caught.value) == (
            "environment worker 0: one actor after the other, the last in process 4711 of host node-3 died: the "
            "worker was killed, while it played slot 1 (tag Hard, seed 31, split all); what it wrote to stderr says why"
        )
        with pytest.raises(SchedulerError, match=r"^the environments are closed"):
            pool.reset_many([request(0, 1)])


def test_actors_that_do_not_start_end_the_run_after_many(cluster: Cluster) -> None:
    """Nineteen of them are bad luck."""
    with open_actors(1) as pool:
        cluster.strikes = dict.fromkeys(range(0, 38, 2), "before")
        pool.reset_many([request(0, 30)])
        assert cluster.num_actors == 20
        first = cluster.num_calls
        cluster.strikes = dict.fromkeys(range(first, first + 100), "before")
        with pytest.raises(
            SchedulerError, match=r"^environment worker 0: one actor after the other, the last in a pro"
        ):
            pool.step_many([(0, [2])])
        assert cluster.num_actors == 40


def test_an_episode_that_goes_otherwise_when_it_is_played_again_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_actors(1) as pool:
        pool.reset_many([request(0, 30), request(1, 31)])
        pool.step_many([(0, [2]), (1, [2])])
        cluster.strikes = {cluster.num_calls: "before"}
        honest = EnvironmentActor.answer
        drifted = request(1, 32)

        def drift(self: EnvironmentActor, call: Any) -> Any:
            if hasattr(call, "requests"):
                call = replace(call, requests=[drifted if one.slot == 1 else one for one in call.requests])
            return honest(self, call)

        monkeypatch.setattr(EnvironmentActor, "answer", drift)
        with pytest.raises(SchedulerError) as caught:
            pool.step_many([(0, [2])])
    assert str(caught.value).startswith(
        "an episode went otherwise when process 4711 of host node-3 played it again after its actor died, so that its "
        "rows cannot be trusted: slot 1 (tag Hard, seed 31): ResetResult("
    )


def test_an_environments_own_error_is_no_death(cluster: Cluster) -> None:
    with open_actors(2) as pool:
        pool.reset_many([request(3, 22)])
        for _ in range(4):
            pool.step_many([(3, [0])])
        with pytest.raises(SchedulerError, match=r"^environment of slot 3 \(tag Hard, seed 22, split all\): Runtime"):
            pool.step_many([(3, [0])])
    assert cluster.num_actors == 2


def test_an_actor_of_other_versions_is_refused(cluster: Cluster) -> None:
    cluster.versions = {"numpy": "1.0"}
    numpy = read_identity().versions["numpy"]
    with open_actors(1) as pool, pytest.raises(ConfigError) as caught:
        pool.reset_many([request(0, 1)])
    assert str(caught.value) == (
        "env_workers: the actor in process 4711 of host node-3 has other versions than this run (numpy 1.0 instead of "
        f"{numpy}), so that rows would depend on where they are played; install the same on every node of the cluster"
    )
    assert numpy != "1.0"


def test_the_code_of_environments_is_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    before = read_identity().versions["pipelines/environments"]
    (tmp_path / "frozen_lake.py").write_text("SLIPPERY = True")
    monkeypatch.setattr(ray_actor, "__file__", str(tmp_path / "ray_actor.py"))
    assert read_identity().versions["pipelines/environments"] != before


def test_an_actor_without_a_place_is_an_error_after_a_time(cluster: Cluster) -> None:
    cluster.is_full = True
    with open_actors(1) as pool, pytest.raises(ConfigError) as caught:
        pool.reset_many([request(0, 1)])
    assert str(caught.value) == (
        "env_workers: an actor has not started within env_workers.startup_timeout_s 120: it needs 1 CPUs, and the Ray "
        "cluster has 0.5 free; end what holds the others, or set fewer num_env_workers or a smaller "
        "env_workers.num_cpus"
    )


def config_of(workers: dict[str, Any], **changes: Any) -> PipelineConfig:
    manager = {"num_env_workers": 2}
    values = {"train_env_manager": manager, "val_env_manager": manager, "exp_name": "x", **changes}
    return PipelineConfig(env_workers={"type": "ray", **workers}, **values)


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_run_connects_once_and_gives_actors_its_settings(cluster: Cluster, address: str) -> None:
    config = config_of({}, system_envs={"PYTHONHASHSEED": "0"})
    environ = {"RAY_ADDRESS": address, "PYTHONHASHSEED": "0", "PYTHONPATH": "/own", "SECRET": "x", "RANK": "0"}
    check_cluster(config, environ)
    found = dict(cluster.connected)
    variables = found.pop("runtime_env")["env_vars"]
    assert variables.pop("PYTHONPATH").endswith(f"{os.pathsep}/own")
    assert variables == {"PYTHONHASHSEED": "0"}
    assert found == {"address": address, "configure_logging": False, "log_to_driver": True}
    assert (os.environ["RAY_USAGE_STATS_ENABLED"], os.environ["RAY_DEDUP_LOGS"]) == ("0", "0")
    cluster.refusal = "never asked"
    connect(config, environ)
    disconnect()
    assert cluster.connected == {}


def test_another_rank_connects_when_it_plays(cluster: Cluster, address: str) -> None:
    check_cluster(config_of({"address": address}), {"RANK": "1"})
    assert cluster.connected == {}


REFUSED = "env_workers.address (or RAY_ADDRESS): "


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "env_workers.type ray: no cluster is named; set env_workers.address or RAY_ADDRESS to HOST:PORT."),
        ("ray://h:1", f"{REFUSED}'ray://h:1' is no address of a cluster; expected HOST:PORT, as"),
        ("auto", f"{REFUSED}'auto' is no address of a cluster; expected HOST:PORT, as"),
        ("127.0.0.1:1", f"{REFUSED}no Ray cluster answers at 127.0.0.1:1 ([Errno 111] Connection refused); start it,"),
    ],
)
def test_an_address_without_a_cluster_is_refused(cluster: Cluster, address: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_cluster(config_of({"address": address}), {})
    assert str(caught.value).startswith(message)
    assert cluster.connected == {}


def test_a_cluster_of_another_version_is_refused(cluster: Cluster, address: str) -> None:
    cluster.refusal = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0"
    with pytest.raises(ConfigError) as caught:
        check_cluster(config_of({"address": address}), {})
    assert str(caught.value) == (
        f"env_workers.address: the Ray cluster at {address} takes no run of Ray 2.60.0 and Python "
        f"{sys.version.split()[0]}: Version mismatch: The cluster was started with: Ray: 2.59.0"
    )


def test_ray_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_cluster(config_of({}), {})
    assert str(caught.value) == (
        f"env_workers.type ray: ray is not installed in {sys.executable}; pip install 'mock-scheduler[ray]', or set "
        "env_workers.type=process"
    )


def test_too_few_cpus_are_an_error_and_the_number_that_fits_is_none(cluster: Cluster, address: str) -> None:
    """Three nodes of 1.5, 4 and 1 CPUs have room for two actors of 2 CPUs, though they have 6.5 in all."""
    cluster.nodes = (1.5, 4.0, 1.0)
    workers = {"address": address, "num_cpus": 2}
    check_cluster(config_of(workers), {})
    check_cluster(config_of({**workers, "num_cpus": 0}, parallel={"data_parallel_size": 2}), {})
    val = {"num_env_workers": 1}
    check_cluster(config_of(workers, val_env_manager=val), {})
    for changes, wanted, replicas in (
        ({"parallel": {"data_parallel_size": 2}}, 4, 2),
        ({"val_env_manager": val, "eval_steps": 1}, 3, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            check_cluster(config_of(workers, **changes), {})
        assert str(caught.value) == (
            f"env_workers: {wanted} workers of 2 CPUs each (num_env_workers of {replicas} replicas) do not fit the "
            "Ray cluster, which has room for 2 (CPUs of its nodes: 1.5, 4, 1); set fewer num_env_workers, a smaller "
            "env_workers.num_cpus (0 keeps none), or add nodes"
        )


def test_a_manager_without_a_worker_is_refused_and_a_replay_needs_none() -> None:
    none = {"num_env_workers": 0}
    with pytest.raises(ValueError, match=r"train_env_manager\.num_env_workers 0 with env_workers\.type ray: there wo"):
        config_of({}, train_env_manager=none)
    config_of({}, val_env_manager=none)
    with pytest.raises(ValueError, match=r"val_env_manager\.num_env_workers 0"):
        config_of({}, val_env_manager=none, eval_steps=1)
    config_of({}, train_env_manager=none, rollout_mock={"enable": True, "mode": "mock", "dump_dir": "x"})


def test_keys_of_ray_without_it_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env_workers\.num_cpus 2\.0 has no effect with env_workers\.type process"):
        config_of({"type": "process", "num_cpus": 2})
