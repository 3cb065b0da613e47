"""A class in the place of ROLL's ``RolloutScheduler``: it becomes the same Ray actor, and has the proxy in it.

Contract: live, the real scheduler's own answer goes to the pipeline, in whatever store its data are; what is recorded
is the batch as it was before ROLL moved it there (``_maybe_dump_batch``, by which ROLL dumps it too). A replay moves
the recorded batch to the same store. In a run that only replays no environment worker, router or queue is made.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from mock_scheduler.adapters.roll.codec import LEFT_AT, DataProto, RollCodec
from mock_scheduler.adapters.roll.settings import RollSettings, describe_config, read_sampling
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import BatchError, ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.build import build_async_scheduler
from mock_scheduler.scheduler import RolloutRequest

_HOOKS = ("_maybe_dump_batch", "_should_load_mock")


class Rollouts:
    """Records what one scheduler gives, or replays it; ``real``: None where every answer is replayed."""

    def __init__(self, config: Any, settings: RollSettings, mode: Mode, run_id: str, real: Any) -> None:  # noqa: ANN401
        self.ledger = Ledger()
        self._real, self._mode = real, mode
        self._live = _Live(real)
        self._scheduler: AsyncProxyScheduler = build_async_scheduler(
            settings.mock_config(),
            lambda: self._live,
            {**describe_config(config), **settings.contract},
            codec=RollCodec(sampling=read_sampling(config)),
            ledger=self.ledger,
            resume=settings.resume,
            run_id=run_id,
            provenance={"framework": "roll"},
        )

    async def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        """Answer ROLL's call."""
        step = int(data.meta_info["global_step"])
        self._live.begin(data, batch_size)
        request = RolloutRequest(
            global_step=step,
            batch_size=max(batch_size, 1),
            has_open_size=True,  # a validation may ask for all, and groups are filtered behind this call
            mode=self._mode,
            policy_version=step,
        )
        answer = await self._scheduler.get_batch(request)
        # ROLL may save a checkpoint next, which must not claim more than what is on disk.
        await self._scheduler.state_dict()
        if self._live.answer is not None:
            return self._live.answer
        answer.meta_info[LEFT_AT] = time.time()
        return await asyncio.get_running_loop().run_in_executor(None, type(answer).to_remote, answer)

    async def close(self) -> None:
        """Write the rest, and raise any error of writing."""
        await self._scheduler.close()


class _Live:
    """ROLL's scheduler as one of this library."""

    def __init__(self, real: Any) -> None:  # noqa: ANN401 - ROLL's
        self._real = real
        self._call: tuple[Any, int] = (None, 0)
        self.answer: DataProto = None

    def begin(self, data: DataProto, batch_size: int) -> None:
        """Note what ROLL asks."""
        self._call, self.answer = (data, batch_size), None

    async def get_batch(self, request: RolloutRequest) -> DataProto:
        """Play, and give the batch as it was before it went to ROLL's store."""
        self.answer = await self._real.get_batch(*self._call)
        merged = self._real.take_merged()
        if self.answer is None or merged is None:
            raise BatchError(f"{request.mode} step {request.global_step}: ROLL's scheduler returned no rows")
        return merged


class RecordedScheduler:
    """ROLL's ``RolloutScheduler`` as its pipeline calls it.

    A subclass says of the run: the class that plays, the settings, the run's identity.
    """

    real: ClassVar[type]
    settings: ClassVar[RollSettings]
    run_id: ClassVar[str]

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - ROLL's
        env_manager_config: Any,  # noqa: ANN401
        resource_manager: Any,  # noqa: ANN401
        infer_cluster: Any,  # noqa: ANN401
        mode: Mode,
        collator: Any = None,  # noqa: ANN401
    ) -> None:
        arguments = (config, env_manager_config, resource_manager, infer_cluster, mode, collator)
        replays = self.settings.mock_config().modes_in_use == {"mock"}
        self._real = None if replays else self.real(*arguments)
        self._rollouts = Rollouts(config, self.settings, mode, self.run_id, self._real)
        self._rollouts.ledger.count("suppressed" if replays else "built", f"{mode} scheduler")

    async def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        """Answer by the rollouts."""
        return await self._rollouts.get_batch(data, batch_size)

    async def initialize(self) -> None:
        """Prepare the real one."""
        await self._pass_on("initialize")

    async def suspend(self) -> None:
        """Suspend the real one."""
        await self._pass_on("suspend")

    async def shrink_sampler(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        """Take engines from the real one."""
        return await self._pass_on("shrink_sampler", *arguments, **options) or {}

    async def expand_sampler(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        """Give engines to the real one."""
        return await self._pass_on("expand_sampler", *arguments, **options) or {}

    async def shutdown(self) -> None:
        """Write the rest, whatever the real one does at its end."""
        try:
            await self._pass_on("shutdown")
        finally:
            await self._rollouts.close()

    async def counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of this actor's ledger."""
        return self._rollouts.ledger.as_dict()

    async def _pass_on(self, name: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if self._real is not None:
            return await getattr(self._real, name)(*arguments, **options)
        self._rollouts.ledger.count("suppressed", name)
        return None


def recorded_scheduler(real: type, settings: RollSettings, run_id: str) -> type:
    """Return the class for ROLL's pipeline to make an actor of; Ray takes it there by its content.

    Raises:
        ConfigError: the real class is of a release without the hooks.
    """
    missing = [name for name in (*_HOOKS, "get_batch") if not hasattr(real, name)]
    if missing:
        raise ConfigError(
            f"{real.__module__}.{real.__name__} has no {', '.join(missing)}: this release of ROLL cannot be recorded. "
            "The adapter was written for 0.3.0"
        )
    watched, its_settings, its_id = _watch(real), settings, run_id

    class Scheduler(RecordedScheduler):
        real = watched
        settings = its_settings
        run_id = its_id

    return Scheduler


def _watch(base: Any) -> type:  # noqa: ANN401 - a class of ROLL
    class WatchedScheduler(base):  # type: ignore[misc]  # of ROLL
        """ROLL's own, which shows each batch before it goes to the store."""

        _merged = None

        def _should_load_mock(self, global_step: int) -> bool:
            return False

        async def _maybe_dump_batch(self, batch: DataProto, global_step: int) -> None:
            # ROLL adds to the batch that it returns; the recorded one is as it is now.
            self._merged = batch

        def take_merged(self) -> DataProto:
            """Return the last batch once."""
            merged, self._merged = self._merged, None
            return merged

    return WatchedScheduler
