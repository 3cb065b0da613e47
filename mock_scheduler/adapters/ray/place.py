"""Finds whether this process is a Ray actor, and what that means for a proxy which is built in it.

Contract: imports no Ray; a process that has not imported it is no actor. Nothing is found out by a name that a user
chose.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass

from mock_scheduler.errors import ConfigError

_LOGGER = "mock_scheduler"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorPlace:
    """The actor that this process is.

    ``actor_id``: the same after a restart by Ray, and no other actor's in any cluster. ``driver_dir``: the working
    directory of the program that started it; None where that runs on another machine, or has ended.
    """

    actor_id: str
    is_restarted: bool
    driver_dir: str | None

    def locate(self, folder: str) -> str:
        """Returns a folder as the driver would find it. Raises ``ConfigError`` where that is not known."""
        if os.path.isabs(folder) or "://" in folder:
            return folder
        if self.driver_dir is None:
            raise ConfigError(
                f"rollout_mock.dump_dir {folder!r} is relative to the working directory of the program that started "
                f"this Ray actor, which is not known here (process {os.getpid()} of host {socket.gethostname()}); give "
                "an absolute path, that is os.path.abspath(...) before the actor is made, or a URL"
            )
        return os.path.normpath(os.path.join(self.driver_dir, folder))


def find_actor() -> ActorPlace | None:
    """Returns the actor that this process is; None for any other process."""
    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    actor_id = context.get_actor_id()
    if actor_id is None:
        return None
    with warnings.catch_warnings():  # Ray 2.60 calls what it calls deprecated
        warnings.simplefilter("ignore")
        is_restarted = bool(context.was_current_actor_reconstructed)
    return ActorPlace(actor_id=actor_id, is_restarted=is_restarted, driver_dir=_find_driver_dir(context.get_job_id()))


def show_lines() -> None:
    """Shows this library's lines in an actor whose program has set up no logging: Ray brings them to the driver."""
    logger = logging.getLogger(_LOGGER)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _find_driver_dir(job_id: str) -> str | None:
    from ray._private import state  # the job's driver is told nowhere else
    from ray.util import get_node_ip_address

    job = next((one for one in state.jobs() if one["JobID"] == job_id), None)
    if job is None or job["DriverIPAddress"] not in (get_node_ip_address(), "127.0.0.1"):
        return None
    with suppress(OSError):  # it has ended, or is another user's
        return os.readlink(f"/proc/{job['DriverPid']}/cwd")
    return None
