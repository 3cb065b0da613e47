"""TRL's GRPOTrainer and AsyncGRPOTrainer with recorded rollouts (``docs/frameworks/trl.md``).

Importing this imports neither torch nor TRL; its names do, when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mock_scheduler.adapters.lazy_names import lazy_names

if TYPE_CHECKING:
    from mock_scheduler.adapters.trl.asynchronous import AsyncRollouts
    from mock_scheduler.adapters.trl.codec import TrlCodec
    from mock_scheduler.adapters.trl.rollouts import Rollouts
    from mock_scheduler.adapters.trl.samples import SampleCodec
    from mock_scheduler.adapters.trl.trace import trace_callback

__all__ = ["AsyncRollouts", "Rollouts", "SampleCodec", "TrlCodec", "trace_callback"]

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncRollouts": "asynchronous",
        "Rollouts": "rollouts",
        "SampleCodec": "samples",
        "TrlCodec": "codec",
        "trace_callback": "trace",
    },
)
