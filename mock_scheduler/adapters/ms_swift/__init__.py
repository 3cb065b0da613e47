"""ms-swift's Megatron trainers, with recorded rollouts and traced (``docs/frameworks/ms_swift.md``).

Importing this imports neither torch nor ms-swift; its names do, when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mock_scheduler.adapters.lazy_names import lazy_names

if TYPE_CHECKING:
    from mock_scheduler.adapters.ms_swift.codec import SampleCodec
    from mock_scheduler.adapters.ms_swift.plugin import register
    from mock_scheduler.adapters.ms_swift.rollouts import Rollouts

__all__ = ["Rollouts", "SampleCodec", "register"]

__getattr__ = lazy_names(__name__, {"Rollouts": "rollouts", "SampleCodec": "codec", "register": "plugin"})
