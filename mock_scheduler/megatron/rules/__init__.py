"""Rules about Megatron's configuration find, before a model is built, that it cannot train repeatably or rightly.

Contract: imports neither torch nor Megatron.
"""

from mock_scheduler.megatron.rules.rule import Conflict, Effect, MegatronRule, Setup, parse_version
from mock_scheduler.megatron.rules.rules import RULES, check_conflicts, find_conflicts

__all__ = [
    "RULES",
    "Conflict",
    "Effect",
    "MegatronRule",
    "Setup",
    "check_conflicts",
    "find_conflicts",
    "parse_version",
]
