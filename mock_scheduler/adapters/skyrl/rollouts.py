"""The proxy at SkyRL's seam: the generator, which the experiment's ``get_generator`` returns.

    from mock_scheduler.adapters.skyrl.rollouts import with_rollouts
    with_rollouts(BasePPOExp)(cfg).run()

Contract: live, the generator's own output is returned. A replay gives every field of it again, bit for bit, starts no
engine and sends no weights; prompts are drawn from SkyRL's own data loader, before the generator is asked. A step is
one call: its number is SkyRL's global step times the rollouts that a step may take, and those of it before this one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from mock_scheduler.adapters.call_numbers import CallNumbers
from mock_scheduler.adapters.settings import GivenSettings, load_settings
from mock_scheduler.adapters.skyrl.codec import GeneratorOutput, SkyrlCodec
from mock_scheduler.adapters.skyrl.settings import (
    SkyrlSettings,
    check_supported,
    describe_config,
    read_sampling,
    rollouts_per_step,
)
from mock_scheduler.adapters.skyrl.suppress import SuppressedClient, suppress_weight_updates
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.build import build_async_scheduler
from mock_scheduler.scheduler import RolloutRequest

#: Batches of one evaluation, at most.
_BATCHES_PER_EVALUATION = 1000

Experiment = TypeVar("Experiment", bound=type)


class Rollouts:
    """A generator of SkyRL's that records the real one's rollouts, or replays them.

    Args:
        make_generator: makes the real one; it is not called where every answer is replayed.
        cfg: SkyRL's configuration.
        settings: None: of the file that ``MOCK_SCHEDULER_SKYRL`` names.
    """

    def __init__(
        self,
        make_generator: Callable[[], Any],
        *,
        cfg: Any,  # noqa: ANN401 - SkyRL's
        settings: GivenSettings = None,
        ledger: Ledger | None = None,
    ) -> None:
        check_supported(cfg)
        read = load_settings(SkyrlSettings, settings)
        config = read.mock_config()
        self.ledger = Ledger() if ledger is None else ledger
        self.replays = config.modes_in_use == {"mock"}
        self._make_generator = make_generator
        self._numbers = CallNumbers({"train": rollouts_per_step(cfg), "val": _BATCHES_PER_EVALUATION})
        self._group_size = int(cfg.generator.n_samples_per_prompt)
        self._call: tuple[Mapping[str, Any], dict[str, object]] = ({}, {})
        self._scheduler: AsyncProxyScheduler = build_async_scheduler(
            config,
            self._make_real,
            {**describe_config(cfg), **read.contract},
            codec=SkyrlCodec(sampling=read_sampling(cfg)),
            ledger=self.ledger,
            resume=read.resume,
            provenance={"framework": "skyrl"},
        )

    async def generate(self, input_batch: Mapping[str, Any], **options: object) -> GeneratorOutput:
        """Answer SkyRL's call."""
        metadata = input_batch.get("batch_metadata")
        if metadata is None or metadata.global_step is None:
            raise SchedulerError(
                "SkyRL asked its generator without a step in batch_metadata: this adapter serves SkyRL's trainers, and "
                "no entry point that only evaluates or generates"
            )
        mode: Mode = "train" if metadata.training_phase == "train" else "val"
        request = RolloutRequest(
            global_step=self._numbers.next(mode, int(metadata.global_step)),
            batch_size=len(input_batch["prompts"]),
            mode=mode,
            # SkyRL counts training steps from 1, and evaluates after the step that it names.
            policy_version=max(int(metadata.global_step) - (mode == "train"), 0),
            group_size=self._group_size if mode == "train" else None,
            prompts=_prompts(input_batch),
        )
        self._call = (input_batch, options)
        output: GeneratorOutput = await self._scheduler.get_batch(request)
        # SkyRL may save a checkpoint next, which must not claim more than what is on disk.
        await self._scheduler.state_dict()
        return output

    async def close(self) -> None:
        """Write the rest, and raise any error of writing."""
        await self._scheduler.close()

    def _make_real(self) -> _Live:
        self.ledger.count("built", "generator")
        return _Live(self._make_generator(), self)


class _Live:
    """The real generator as a rollout scheduler."""

    def __init__(self, generator: Any, owner: Rollouts) -> None:  # noqa: ANN401 - SkyRL's
        self._generator, self._owner = generator, owner

    async def get_batch(self, request: RolloutRequest) -> GeneratorOutput:
        """Call the generator as SkyRL did."""
        input_batch, options = self._owner._call
        output: GeneratorOutput = await self._generator.generate(input_batch, **options)
        return output


def _prompts(input_batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What SkyRL asks to be played, one by one."""
    names = ("prompts", "env_classes", "env_extras")
    given = {name: input_batch.get(name) or [None] * len(input_batch["prompts"]) for name in names}
    return [dict(zip(names, row, strict=True)) for row in zip(*given.values(), strict=True)]


def with_rollouts(experiment: Experiment, settings: GivenSettings = None, ledger: Ledger | None = None) -> Experiment:
    """Return an experiment of SkyRL (``BasePPOExp``, or your own) whose generator records rollouts, or replays them.

    Args:
        experiment: its class.
        settings: None: of the file that ``MOCK_SCHEDULER_SKYRL`` names, read when the experiment is made.

    Raises:
        ConfigError: the experiment only evaluates.
    """
    base: Any = experiment
    if inspect.iscoroutinefunction(base.run):
        raise ConfigError(
            f"{base.__module__}.{base.__name__} evaluates alone, by a run of its own kind: there is no training to "
            "record. Give an experiment that trains, as BasePPOExp"
        )

    class RecordedExperiment(base):  # type: ignore[misc]  # of SkyRL
        """The experiment with rollouts of the proxy."""

        def __init__(self, cfg: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - SkyRL's
            # Before anything is loaded: what is wrong with the settings or the recording ends the run here.
            self.rollouts = Rollouts(self._make_generator, cfg=cfg, settings=settings, ledger=ledger)
            super().__init__(cfg, *arguments, **options)

        def _make_generator(self) -> Any:  # noqa: ANN401
            return super().get_generator(*self._generator_arguments)

        def get_inference_client(self) -> Any:  # noqa: ANN401
            return SuppressedClient(self.rollouts.ledger) if self.rollouts.replays else super().get_inference_client()

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Rollouts:  # noqa: ANN401
            self._generator_arguments = cfg, tokenizer, inference_engine_client
            return self.rollouts

        def get_trainer(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            trainer = super().get_trainer(*arguments, **options)
            if self.rollouts.replays:
                suppress_weight_updates(trainer, self.rollouts.ledger)
            return trainer

        def run(self) -> None:
            try:
                super().run()
            finally:
                asyncio.run(self.rollouts.close())

    RecordedExperiment.__name__ = RecordedExperiment.__qualname__ = f"Recorded{base.__name__}"
    return cast("Experiment", RecordedExperiment)
