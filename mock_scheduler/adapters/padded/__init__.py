"""Frameworks' padded tensors as rollout batches and back, bit for bit: ``PaddedCodec`` and its layouts."""

from mock_scheduler.adapters.padded.codec import PaddedCodec
from mock_scheduler.adapters.padded.layout import AREAL, ROLL_AGENTIC, ROLL_RLVR, VERL, Frame, PaddedLayout

__all__ = ["AREAL", "Frame", "PaddedCodec", "PaddedLayout", "ROLL_AGENTIC", "ROLL_RLVR", "VERL"]
