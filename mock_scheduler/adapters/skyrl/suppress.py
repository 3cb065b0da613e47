"""What else must not start where every rollout of SkyRL is replayed: inference engines, and weights sent to them.

Contract: the trainer's own steps stay. A client that stands for the engines counts what is asked of it, and refuses to
generate. Without engines the policy stays where training left it; SkyRL moves models itself where it needs the room.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger

_GENERATING = ("generate", "chat_completion", "completion", "render_chat_completion", "get_endpoint_url")
_IDLE = (
    *("wake_up", "sleep", "update_named_weights", "load_lora_adapter", "teardown", "reset_prefix_cache"),
    *("pause_generation", "resume_generation", "finish_session"),
)


class SuppressedClient:
    """Stands for SkyRL's ``InferenceEngineInterface``: there is no engine behind it."""

    model_name = "replayed"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.count("suppressed", "engines")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _GENERATING:
            raise SchedulerError(
                f"SkyRL asked its inference engine ({name}) in a run that only replays: the rollout was not taken from "
                "the recording. Let get_generator return the generator of the adapter, and call no engine elsewhere"
            )
        if name in _IDLE:
            return self._count(name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    async def is_sleeping(self) -> bool:
        """No engine holds memory."""
        return True

    async def get_world_size(self) -> tuple[int, int]:
        """No engine has workers."""
        return 0, 0

    def _count(self, name: str) -> Callable[..., Awaitable[None]]:
        async def count(*_arguments: object, **_options: object) -> None:
            self._ledger.count("suppressed", name)

        return count


def suppress_weight_updates(trainer: Any, ledger: Ledger) -> None:  # noqa: ANN401 - SkyRL's
    """Keep a trainer from meeting its engines, and from sending them weights; its dispatch exists once models do."""

    def init_weight_sync_state() -> None:
        ledger.count("suppressed", "init_weight_sync_state")

    async def save_weights_for_sampler(*_arguments: object, **_options: object) -> None:
        ledger.count("suppressed", "save_weights_for_sampler")

    build = trainer.build_models

    @functools.wraps(build)
    def build_models(*arguments: object, **options: object) -> object:
        built: object = build(*arguments, **options)
        trainer.dispatch.save_weights_for_sampler = save_weights_for_sampler
        return built

    trainer.init_weight_sync_state = init_weight_sync_state
    trainer.build_models = build_models
