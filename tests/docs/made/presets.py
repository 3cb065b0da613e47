"""Writes ``docs/presets.md``: each preset of rollout correction, as the log describes it, and its source."""

from __future__ import annotations

from itertools import groupby

from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.docs.made.docstrings import in_a_cell, table

_HEAD = """# Presets of rollout correction

*For whoever chooses a preset; to look things up.*

What each `algorithm.rollout_correction.preset` does. The page [rollout
correction](rollout_correction.md#presets) explains rules and words. This page is written by `launch/docs.sh` from
`mock_scheduler/correction/config/presets.py`.

Left out where they are the defaults: log-probabilities that are not finite are rejected, and rejected tokens count in
the denominator. Names of verl 0.6.1 that mean something else in 0.9.1 have the release in them.
"""
#: What is left out.
USUAL = ("log-probabilities that are not finite: reject", "rejected tokens count in the denominator")


def render_presets() -> str:
    """Returns the page: a table for each system, in the order of the presets."""
    parts = [_HEAD]
    for system, names in groupby(PRESETS, _system):
        header = ("name", "what it does", "source")
        rows = [(f"`{name}`", in_a_cell(describe(name)), in_a_cell(_source(name))) for name in names]
        parts.append(f"## {system}\n\n{table(header, rows)}\n")
    return "\n".join(parts)


def describe(name: str) -> str:
    """Returns what the log says of a preset, without what is usual."""
    parts = RolloutCorrectionConfig(preset=name).spec.describe().split("; ")
    return "; ".join(part for part in parts if part not in USUAL)


def _system(name: str) -> str:
    verl, rest = PRESETS[name].source[:4], PRESETS[name].source[5:]
    return f"verl {rest.partition(',')[0]}" if verl == "verl" else "Other systems"


def _source(name: str) -> str:
    preset = PRESETS[name]
    return preset.source + (f" ({preset.remark})" if preset.remark else "")
