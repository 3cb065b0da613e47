"""What else must not start where rollouts are replayed: engines, their GPUs, weights sent to them, evaluation.

slime, miles and vime have one switch for all of it, ``--debug-train-only``: no server is started, the placement group
has no rollout GPUs, ``update_weights`` returns at once, and evaluation gives nothing. It must be on the command line,
since servers are started before any rollout is asked for. Contract: a replay without the switch, and a live run with
it, are refused at the first rollout.
"""

from __future__ import annotations

from typing import Any

from mock_scheduler.adapters.slime.settings import SlimeSettings
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger

SWITCH = "--debug-train-only"
_SUPPRESSED = ("engines", "weight_updates", "evaluation")


def check_switch(args: Any, config: RolloutMockConfig, settings: SlimeSettings, ledger: Ledger) -> None:  # noqa: ANN401
    """Count what the switch suppresses; raises ``ConfigError`` where it contradicts the mode.

    ``args``: the framework's own arguments.
    """
    is_off = bool(getattr(args, "debug_train_only", False))
    is_replay = config.enable and config.mode == "mock" and not config.schedule
    if is_off and not is_replay:
        raise ConfigError(
            f"{SWITCH} starts no engine, and rollout_mock.mode={config.mode} needs one: leave the switch out"
        )
    if is_off:
        for name in _SUPPRESSED:
            ledger.count("suppressed", name)
    elif is_replay and not settings.with_engines:
        raise ConfigError(
            f"rollout_mock.mode=mock needs no engine, and engines were started: give {SWITCH} on the command line, or "
            "set with_engines: true where they are meant to run beside the replay"
        )
