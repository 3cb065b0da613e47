"""Connects a run to a Ray cluster, or says why it cannot; a run never starts one.

Contract: only a run with ``env_workers.type: ray`` that plays imports this module, and Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.support.text import on_one_line
from mock_scheduler.support.versions import ROOT
from pipelines.config.schema import PipelineConfig

_ADDRESS = "RAY_ADDRESS"
_CONNECT_S = 5.0
# Ray ends a process whose head has ended, with exit code 1 and after a minute, of which a long step has more than one.
_RECONNECT = ("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
# A head that is busy may miss one.
_NUM_CHECKS, _BETWEEN_CHECKS_S = 3, 1.0
# As long as Ray itself waits at the end of a driver: an actor's last lines come by the cluster's log monitor.
_LAST_LINES_S = 0.5
_HOW = "launch/ray.sh starts one on this machine for a run"


def check_cluster(config: PipelineConfig, environ: Mapping[str, str]) -> None:
    """Refuses a run whose workers could not be started; its first rank connects for that, and stays connected.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, it is of another version, or has too few CPUs.
    """
    _find_address(config, environ)
    if environ.get("RANK", "0") == "0":
        connect(config, environ)
        _check_cpus(config)


def connect(config: PipelineConfig, environ: Mapping[str, str]) -> None:
    """Connects this process to the cluster, once. Raises ``ConfigError`` where it cannot."""
    address = _find_address(config, environ)
    # No dashboard, no statistics for Ray's authors; equal lines of two actors are two lines.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault(*_RECONNECT)
    import ray

    if ray.is_initialized():
        return
    names = ("PYTHONHASHSEED", *config.system_envs)
    variables = {name: environ[name] for name in names if name in environ}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    on_end = signal.getsignal(signal.SIGTERM)
    try:
        # Ray puts the working directory first in an actor's import path, where a module would shadow Python's own.
        with contextlib.chdir(ROOT):
            ray.init(address=address, runtime_env={"env_vars": variables}, configure_logging=False, log_to_driver=True)
    except (RuntimeError, OSError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"env_workers.address: the Ray cluster at {address} takes no run of Ray {ray.__version__} and Python "
            f"{'.'.join(map(str, sys.version_info[:3]))}: {on_one_line(error)}"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Ray would end the run with exit code 15, which names no signal to whoever waits for it.
        signal.signal(signal.SIGTERM, on_end)


def check_goes_on() -> None:
    """Raises ``SchedulerError``, with the place of its logs, where the cluster's head has ended."""
    for _ in range(_NUM_CHECKS - 1):
        if _find_end() is None:
            return
        time.sleep(_BETWEEN_CHECKS_S)
    end = _find_end()
    if end is not None:
        raise SchedulerError(
            f"env_workers: the head of the Ray cluster at {_gcs_address()} has ended ({end}), and its actors with it. "
            f"Why is in {_find_logs()} on the head's machine: gcs_server.out and raylet.out. Every step that the log "
            "calls Dumped is in the recording; start a cluster, and go on from the last checkpoint with "
            f"resume_from_checkpoint. {_HOW}"
        ) from end


def has_ended() -> bool:
    """Whether the cluster's head has ended, so that nothing can be asked of it, and nothing need be."""
    import ray

    return ray.is_initialized() and _find_end() is not None


def disconnect() -> None:
    """Leaves the cluster, once the last lines of actors have come."""
    import ray

    if ray.is_initialized():
        time.sleep(_LAST_LINES_S)
        ray.shutdown()


def _find_end() -> OSError | None:
    """Why nobody listens at the cluster's address; None where somebody does."""
    host, _, port = _gcs_address().rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        return error
    return None


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _find_logs() -> str:
    from ray._private import worker  # it is told nowhere else

    return str(worker.global_worker.node.get_logs_dir_path())


def _find_address(config: PipelineConfig, environ: Mapping[str, str]) -> str:
    """Finds the cluster's address, and somebody who listens there. Raises ``ConfigError`` where there is none."""
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"env_workers.type ray: ray is not installed in {sys.executable}; pip install 'mock-scheduler[ray]', or "
            "set env_workers.type=process"
        )
    address = config.env_workers.address or environ.get(_ADDRESS)
    if not address:
        raise ConfigError(
            f"env_workers.type ray: no cluster is named; set env_workers.address or {_ADDRESS} to HOST:PORT. {_HOW}"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"env_workers.address (or {_ADDRESS}): {address!r} is no address of a cluster; expected HOST:PORT, as "
            "`ray start --head` prints it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"env_workers.address (or {_ADDRESS}): no Ray cluster answers at {address} ({error}); start it, or correct "
            f"the address. {_HOW}"
        ) from error
    return address


def _check_cpus(config: PipelineConfig) -> None:
    import ray

    workers = config.env_workers
    if not workers.num_cpus:
        return
    managers = [config.train_env_manager, *([config.val_env_manager] if config.eval_steps else [])]
    numbers = {manager.num_env_workers for manager in managers}  # two with the same number share their workers
    wanted = config.parallel.data_parallel_size * sum(numbers)
    cpus = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    possible = sum(int(number // workers.num_cpus) for number in cpus)
    if possible < wanted:
        raise ConfigError(
            f"env_workers: {wanted} workers of {workers.num_cpus:g} CPUs each (num_env_workers of "
            f"{config.parallel.data_parallel_size} replicas) do not fit the Ray cluster, which has room for {possible} "
            f"(CPUs of its nodes: {', '.join(f'{number:g}' for number in cpus)}); set fewer num_env_workers, a smaller "
            "env_workers.num_cpus (0 keeps none), or add nodes"
        )
