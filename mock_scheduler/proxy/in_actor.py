"""A proxy that is built in a Ray actor: where its folder is, which run it is of, and how it goes on after a restart.

Contract: imports no Ray, and outside of an actor nothing happens; nothing is found out by a name that a user chose. An
actor records under its own id, so an actor that Ray started again knows its own recording, and refuses any other. It
goes on as mode cache does: what was recorded before is answered from the recording, whatever is asked for again, and
the rest is played. Before that the real scheduler gets the state recorded with the last training step (``ProxyCore``).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

from mock_scheduler.config.base import RolloutMode
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError, RecordingError
from mock_scheduler.proxy.routing import modes_to_prepare
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.paths import MANIFEST_NAME
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.writing.admission import other_run_text
from mock_scheduler.support.locations import find_protocol
from mock_scheduler.support.terminal_streams import MessageHandler

_LOGGER = "mock_scheduler"

logger = logging.getLogger(f"{_LOGGER}.rollout_mock")


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
        if os.path.isabs(folder) or find_protocol(folder) is not None:
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
        logger.addHandler(MessageHandler())
        logger.setLevel(logging.INFO)


def settle_in_actor(settings: ProxySettings) -> ProxySettings:
    """Returns the settings for this process, which may be a Ray actor.

    Raises:
        ConfigError: a relative folder, and the driver's directory is not known.
        RecordingError: a restarted actor finds another run's recording, or has a row shard.
    """
    place = find_actor()
    modes = modes_to_prepare(settings.config, settings.plan) - {"real"}
    if place is None or not modes:
        return settings
    show_lines()
    config = settings.config.model_copy(update={"dump_dir": place.locate(settings.config.dump_dir)})
    settings = replace(settings, config=config)
    if "dump" in modes and not settings.resume and settings.run_id is None:
        settings = replace(settings, run_id=f"ray-actor-{place.actor_id}")
    return _go_on(settings, place, modes) if place.is_restarted and modes & {"dump", "cache"} else settings


def _go_on(settings: ProxySettings, place: ActorPlace, modes: frozenset[RolloutMode]) -> ProxySettings:
    if settings.shard is not None:
        raise RecordingError(
            f"[Rollout Mock] Ray started the actor {place.actor_id} again, which records a row shard: the other shards "
            "of its step may be written or not. End the run, and start all its actors from the last checkpoint with "
            "resume=True"
        )
    storage = open_storage(settings.config.dump_dir)
    # An actor may have died before it began its recording, in a folder that is another run's.
    if "dump" in modes and settings.run_id is not None and storage.exists(MANIFEST_NAME):
        found = load_manifest(storage).run_id
        if found != settings.run_id:
            raise RecordingError(other_run_text(storage, found, settings.run_id))
    if settings.is_logging:
        logger.warning(
            "[Rollout Mock] Ray started this actor again: it goes on with its recording in %s; steps in it are "
            "answered from it, and the next ones played",
            storage.location,
        )
    return replace(settings, config=_as_cache(settings.config), resume=True, is_restarted=True)


def _as_cache(config: RolloutMockConfig) -> RolloutMockConfig:
    entries = [
        entry.model_copy(update={"mode": "cache"}) if entry.mode == "dump" else entry for entry in config.schedule
    ]
    mode = "cache" if config.mode == "dump" else config.mode
    return config.model_copy(update={"mode": mode, "schedule": entries})


def _find_driver_dir(job_id: str) -> str | None:
    from ray._private import state  # the job's driver is told nowhere else
    from ray.util import get_node_ip_address

    job = next((one for one in state.jobs() if one["JobID"] == job_id), None)
    if job is None or job["DriverIPAddress"] not in (get_node_ip_address(), "127.0.0.1"):
        return None
    with suppress(OSError):  # it has ended, or is another user's
        return os.readlink(f"/proc/{job['DriverPid']}/cwd")
    return None
