"""TRL's engine, kept from starting where every answer is replayed.

With ``use_vllm=False`` TRL turns its importance-sampling correction off, so a replay keeps ``use_vllm=True``, and the
class that would start vLLM, or look for its server, is another one while the trainer is built. There is no official
way: ``trl.trainer.grpo_trainer.VLLMGeneration`` is rebound, and put back by ``restore``.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger

_MODULE, _NAME = "trl.trainer.grpo_trainer", "VLLMGeneration"


class SuppressedEngine:
    """Stands for ``VLLMGeneration``: nothing is started, weights go nowhere, and generating is refused."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Server mode asks which log-probabilities the server gives; the recorded ones are those after temperature.
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def sync_weights(self, *_arguments: object, **_options: object) -> None:
        """Count the call: weights of a replay are nobody's to sample with."""
        self._ledger.count("suppressed", "sync_weights")

    def generate(self, *_arguments: object, **_options: object) -> object:
        """Refuse: a replay that generates would run live without a word."""
        raise SchedulerError(
            "TRL asked its engine to generate in a run that only replays: the rollout was not taken from the "
            "recording. Give GRPOTrainer rollout_func=rollouts, and no tools or environment_factory"
        )


class EngineSwitch:
    """Keeps TRL's engine from starting until ``restore``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._module: Any = import_module(_MODULE)
        self._original = getattr(self._module, _NAME, None)
        if self._original is None:
            raise ConfigError(
                f"{_MODULE} has no {_NAME}: this release of TRL starts its engine elsewhere, and a replay would start "
                "it too. The adapter was tried with the versions that mock-scheduler frameworks lists"
            )
        setattr(self._module, _NAME, self._build)

    def restore(self) -> None:
        """Put TRL's class back; a second call does nothing."""
        setattr(self._module, _NAME, self._original)

    def _build(self, *_arguments: object, **_options: object) -> SuppressedEngine:
        self._ledger.count("suppressed", "engine")
        return SuppressedEngine(self._ledger)
