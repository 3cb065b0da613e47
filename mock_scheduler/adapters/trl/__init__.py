"""TRL's GRPOTrainer and AsyncGRPOTrainer with recorded rollouts (``docs/frameworks/trl.md``)."""

from mock_scheduler.adapters.trl.codec import TrlCodec
from mock_scheduler.adapters.trl.rollouts import Rollouts

__all__ = ["Rollouts", "TrlCodec"]
