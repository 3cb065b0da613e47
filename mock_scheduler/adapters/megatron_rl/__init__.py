"""megatron/rl, the reinforcement learning in Megatron-LM, with recorded rollouts (``docs/frameworks/megatron_rl.md``).

Importing this imports neither torch nor Megatron; its names do, when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mock_scheduler.adapters.lazy_names import lazy_names

if TYPE_CHECKING:
    from mock_scheduler.adapters.megatron_rl.codec import GroupedRolloutsCodec
    from mock_scheduler.adapters.megatron_rl.rollouts import Rollouts, attach_rollouts

__all__ = ["GroupedRolloutsCodec", "Rollouts", "attach_rollouts"]

__getattr__ = lazy_names(
    __name__, {"GroupedRolloutsCodec": "codec", "Rollouts": "rollouts", "attach_rollouts": "rollouts"}
)
