"""Checks whether all ranks of a run hold the same values, at a cost independent of their number.

``agreement.rounds`` is the exchange alone, without torch; this package imports torch.
"""

from mock_scheduler.determinism.agreement.group import RankGroup, TorchRankGroup, all_equal, check_agreement

__all__ = ["RankGroup", "TorchRankGroup", "all_equal", "check_agreement"]
