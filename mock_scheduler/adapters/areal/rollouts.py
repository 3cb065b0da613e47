"""The proxy at AReaL's seam: ``actor.prepare_batch`` of its trainer.

    from mock_scheduler.adapters.areal.rollouts import with_rollouts
    with with_rollouts(PPOTrainer)(config, train_dataset=train, valid_dataset=valid) as trainer: ...

Contract: live, the actor's own trajectories are returned, whether their tensors are here or with a worker. A replay
gives trajectories of tensors that are here, bit for bit, starts no engine, sends no weights and evaluates nothing, and
draws as many batches of prompts as the rollout did. A step is AReaL's global step; versions of tokens are recorded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from mock_scheduler.adapters.areal.codec import ArealCodec, Trajectory
from mock_scheduler.adapters.areal.prompts import PromptLoader
from mock_scheduler.adapters.areal.settings import ArealSettings, check_supported, describe_config, read_sampling
from mock_scheduler.adapters.areal.suppress import SuppressedRollout, suppress_weight_updates
from mock_scheduler.adapters.settings import GivenSettings, load_settings, read_key
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

Trainer = TypeVar("Trainer", bound=type)
_RTENSOR = "areal.infra.rpc.rtensor"


class Rollouts:
    """Records what an actor's ``prepare_batch`` gives, or replays it.

    Args:
        config: AReaL's configuration.
        settings: None: of the file that ``MOCK_SCHEDULER_AREAL`` names.
    """

    def __init__(self, config: Any, settings: GivenSettings = None, ledger: Ledger | None = None) -> None:  # noqa: ANN401
        read = load_settings(ArealSettings, settings)
        mock = read.mock_config()
        check_supported(mock)
        self.ledger = Ledger() if ledger is None else ledger
        self.replays = mock.modes_in_use == {"mock"}
        self._next_step = 0
        self._loader: PromptLoader | None = None
        self._live = _Live()
        self._scheduler: ProxyScheduler = build_scheduler(
            mock,
            lambda: self._live,
            {**describe_config(config), **read.contract},
            codec=ArealCodec(
                sampling=read_sampling(config),
                localize=localize,
                has_fixed_size=not read_key(config, "dynamic_bs", default=False),
            ),
            ledger=self.ledger,
            resume=read.resume,
            provenance={"framework": "areal"},
        )

    def take_over(self, actor: Any) -> None:  # noqa: ANN401 - AReaL's
        """Answer for an actor from now on."""
        self._live.prepare = actor.prepare_batch
        actor.prepare_batch = self.prepare_batch
        if self.replays:
            suppress_weight_updates(actor, self.ledger)

    def start_at(self, step: int) -> None:
        """Number the next batch, as of a run that goes on from a checkpoint."""
        self._next_step = step

    def prepare_batch(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - AReaL's
        """Answer AReaL's call."""
        if self._loader is None or self._loader.loader is not dataloader:
            self._loader = PromptLoader(dataloader)
        loader, step = self._loader, self._next_step
        self._live.begin(loader, arguments, options)
        request = RolloutRequest(
            global_step=step,
            batch_size=int(dataloader.batch_size),  # of prompts; their samples vary, since failed ones are left out
            has_open_size=True,
            policy_version=step,
        )
        trajectories = self._scheduler.get_batch(request)
        # AReaL may save a checkpoint next, which must not claim more than what is on disk.
        state: Any = self._scheduler.state_dict()["scheduler"]
        if not self._live.is_played:
            loader.draw(int(state.get("drawn", 0)))
        self._next_step = step + 1
        return trajectories

    def close(self) -> None:
        """Write the rest, and raise any error of writing."""
        self._scheduler.close()


class _Live:
    """The actor's own ``prepare_batch`` as a rollout scheduler."""

    def __init__(self) -> None:
        self.prepare: Callable[..., Any] | None = None
        self.is_played = False
        self._drawn = 0
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] = (None, (), {})

    def begin(self, loader: PromptLoader, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note what the actor was asked with."""
        self._call, self.is_played = (loader, arguments, options), False

    def get_batch(self, request: RolloutRequest) -> Any:  # noqa: ANN401 - AReaL's
        """Ask the actor as AReaL did."""
        del request
        assert self.prepare is not None  # an actor was taken over before its trainer trains
        loader, arguments, options = self._call
        before = loader.drawn
        trajectories = self.prepare(loader, *arguments, **options)
        self.is_played, self._drawn = True, loader.drawn - before
        return trajectories

    def state_dict(self) -> dict[str, JSON]:
        """Tell how many batches of prompts the rollout drew."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: object) -> None:
        """Do nothing: each replayed step has drawn its prompts."""


def localize(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return trajectories with their tensors in this process; AReaL's own handles stay as they are."""
    module: Any = sys.modules.get(_RTENSOR)  # where no handle can be, it was never imported
    if module is None:
        return trajectories
    handles = _copy_handles(list(trajectories), module.RTensor)
    found: Sequence[Trajectory] = module.RTensor.localize(handles)
    # AReaL drops what it has fetched when the batch is trained on; what was fetched for the recording is dropped here.
    module.clear_fetch_buffer(module.flatten_shard_ids(handles))
    return found


def _copy_handles(value: Any, kind: type) -> Any:  # noqa: ANN401 - of trajectories
    if isinstance(value, kind):
        return copy.copy(value)  # fetching fills a handle
    if isinstance(value, dict):
        return {name: _copy_handles(item, kind) for name, item in value.items()}
    return [_copy_handles(item, kind) for item in value] if isinstance(value, list) else value


def with_rollouts(trainer: Trainer, settings: GivenSettings = None, ledger: Ledger | None = None) -> Trainer:
    """Return a trainer of AReaL (``PPOTrainer``, or your own) that records its rollouts, or replays them.

    Args:
        trainer: its class.
        settings: None: of the file that ``MOCK_SCHEDULER_AREAL`` names, read when the trainer is made.
    """
    base: Any = trainer

    class RecordedTrainer(base):  # type: ignore[misc]  # of AReaL
        """The trainer with rollouts of the proxy."""

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - AReaL's
            # Before any engine: what is wrong with the settings or the recording ends the run here.
            self.rollouts = Rollouts(config, settings, ledger)
            super().__init__(config, *arguments, **options)
            if self.recover_info is not None:
                self.rollouts.start_at(self.recover_info.last_step_info.next().global_step)

        def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:  # noqa: ANN401
            if not is_eval:  # AReaL has its actor by then, and connects it to the engine next
                self.rollouts.take_over(self.actor)
            if self.rollouts.replays:
                return SuppressedRollout(self.rollouts.ledger, is_evaluating=is_eval)
            return super()._init_rollout(rollout_config, is_eval=is_eval, lora_path=lora_path)

        def _ensure_proxy_started(self) -> None:
            if not self.rollouts.replays:
                super()._ensure_proxy_started()

        def close(self) -> None:
            try:
                super().close()
            finally:
                self.rollouts.close()

    RecordedTrainer.__name__ = RecordedTrainer.__qualname__ = f"Recorded{base.__name__}"
    return cast("Trainer", RecordedTrainer)
