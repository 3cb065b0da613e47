"""Traces a training of ms-swift's Megatron trainers, and records or replays its rollouts, by their callback.

    # mock_plugin.py
    from mock_scheduler.adapters import ms_swift
    ms_swift.register()

    megatron rlhf ... --external_plugins mock_plugin.py --callbacks mock_scheduler

Contract: where ``MOCK_SCHEDULER_RUN`` names no run file nothing is traced, and where ``MOCK_SCHEDULER_MS_SWIFT`` names
no settings rollouts are ms-swift's own. A trainer is given to its callbacks once model and optimizer are there, and
before its engine is made.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

from mock_scheduler import megatron
from mock_scheduler.adapters.ms_swift.codec import Foreign
from mock_scheduler.adapters.ms_swift.rollouts import Rollouts
from mock_scheduler.adapters.ms_swift.settings import find_settings
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger

NAME = "mock_scheduler"
_SEAM = "_generate_completions"
_PIPELINE = "swift.megatron.pipelines.train.rlhf"
_CLIENT = "_prepare_vllm_client"

#: Of this process: the connection to a server is made, or not, before there is a trainer.
ledger = Ledger()


class Attachment:
    """Does what the callback does, whatever release of ms-swift its base class is of."""

    def __init__(self, trainer: Foreign) -> None:
        super().__init__(trainer)  # type: ignore[call-arg]  # ms-swift's MegatronCallback, behind this class
        self._trainer = trainer
        self._tracing = megatron.AttachCallback()
        self._rollouts: Rollouts | None = None
        settings = find_settings()
        if settings is not None and hasattr(trainer, _SEAM):
            self._rollouts = Rollouts(trainer, settings, ledger=ledger)
        elif settings is not None:
            raise ConfigError(
                f"{type(trainer).__name__} plays no rollouts that could be recorded (it has no {_SEAM}): unset "
                "MOCK_SCHEDULER_MS_SWIFT. Tracing needs MOCK_SCHEDULER_RUN alone"
            )

    def on_train_begin(self) -> None:
        """Attaches to the chunks and the optimizer."""
        trainer = self._trainer
        self._tracing.on_train_start(SimpleNamespace(model=trainer.wrapped_models, optimizer=trainer.optimizer))

    def on_step_begin(self) -> None:
        """Begins a step; its rollouts are within it."""
        self._tracing.on_train_step_start(self._trainer)

    def on_step_end(self) -> None:
        """Ends it."""
        self._tracing.on_train_step_end(self._trainer)

    def on_train_end(self) -> None:
        """Leaves all files."""
        self._tracing.on_train_end(self._trainer)
        if self._rollouts is not None:
            self._rollouts.close()


def register() -> None:
    """Names the callback in ms-swift's table, for ``--callbacks``; for a run that only replays, connects to no server.

    Raises:
        ConfigError: ms-swift is not there, or of another form; or the settings have problems.
    """
    try:
        callbacks: Foreign = import_module("swift.megatron.callbacks")
        table, base = callbacks.megatron_callbacks_map, callbacks.MegatronCallback
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"ms-swift's table of callbacks cannot be imported ({error}): the adapter was tried with the versions that "
            "mock-scheduler frameworks lists"
        ) from error
    table[NAME] = type("MockSchedulerCallback", (Attachment, base), {"__doc__": Attachment.__doc__})
    settings = find_settings()
    if settings is not None and settings.is_replay_alone:
        pipeline: Foreign = import_module(_PIPELINE).MegatronRLHF
        if not hasattr(pipeline, _CLIENT):
            raise ConfigError(
                f"{_PIPELINE} has no {_CLIENT}: this release of ms-swift connects to its server elsewhere"
            )
        setattr(pipeline, _CLIENT, _connect_to_none)


def _connect_to_none(self: Foreign) -> None:
    ledger.count("suppressed", "server")
