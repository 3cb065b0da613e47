"""A proxy that is built in a Ray actor: where its folder is, which run it is of, and how it goes on after a restart.

Contract: outside of an actor nothing happens. An actor records under its own id, so an actor that Ray started again
knows its own recording, and refuses any other. It goes on as mode cache does: what was recorded before is answered from
the recording, whatever is asked for again, and the rest is played. Before that the real scheduler gets the state
recorded with the last training step (``ProxyCore``).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from mock_scheduler.adapters.ray.place import ActorPlace, find_actor, show_lines
from mock_scheduler.config.base import RolloutMode
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import RecordingError
from mock_scheduler.proxy.routing import modes_to_prepare
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.paths import MANIFEST_NAME
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.writing.admission import other_run_text

logger = logging.getLogger("mock_scheduler.rollout_mock")


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
