"""docs/faults.md: what the matrix is, its summary, the matrix, and every fault's first divergence."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.campaign import CLEAN
from tests.faults.catalogue import FAULTS
from tests.faults.judging import Judgement
from tests.faults.table import summarise, to_markdown

_HEAD = """# The fault catalogue

Made by `python -m tests.faults --markdown docs/faults.md`; do not edit by hand.
"""


def render_page(judgements: Sequence[Judgement]) -> str:
    """The whole page."""
    return f"{_HEAD}\n{summarise(judgements)}\n\n{to_markdown(judgements)}\n{CLEAN} {len(FAULTS)}\n"
