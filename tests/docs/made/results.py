"""Writes ``docs/results.md``: the fields of every JSON that a command writes, from docstrings and types."""

from __future__ import annotations

import inspect
from types import ModuleType

from mock_scheduler.comparison import findings
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricDifference
from mock_scheduler.doctor import view as doctor_view
from mock_scheduler.report import json_file, verdict_json
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.recording import diff
from mock_scheduler.trace.start_report import StartReport
from mock_scheduler.verdict import reasons
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.results import AlignmentTimes, CandidateResult
from tests.docs.made.docstrings import describe_dataclass, in_a_cell, paragraphs, table

_HEAD = """# Result files

*For whoever reads results with a program; to look things up.*

The JSON that commands write: `align.json`, and `--json` of `align`, `compare`, `replicas`, `diff` and `doctor`. This
page is written by `launch/docs.sh` from docstrings and types.
"""

#: Objects with fields of their own, by the heading of their table.
_OBJECTS = {
    "A candidate of an alignment": CandidateResult,
    "A tensor": TensorDifference,
    "A metric": MetricDifference,
    "`localisation`": Localisation,
    "`consequence`": Consequence,
    "`start`": StartReport,
    "`times`": AlignmentTimes,
    "`report` of an alignment": AlignmentView,
    "`report` of a candidate": CandidateView,
}


def render_results() -> str:
    """Returns the page."""
    parts = [_HEAD, _section("Commands", json_file), _section("A verdict", verdict_json)]
    parts.append(_section("`diff --json`", diff))
    parts.append(_section("`doctor --json`", doctor_view))
    parts += [f"## {title}\n\n{describe_dataclass(cls)}\n" for title, cls in _OBJECTS.items()]
    parts.append(f"## Reasons\n\nThe `name` of `why`:\n\n{_classes(reasons)}\n")
    parts.append(f"## Findings\n\nThe kinds of a finding:\n\n{_classes(findings)}\n")
    return "\n".join(parts).rstrip() + "\n"


def _section(title: str, module: ModuleType) -> str:
    return f"## {title}\n\n{paragraphs(inspect.cleandoc(module.__doc__ or ''))}\n"


def _classes(module: ModuleType) -> str:
    """Returns a table of a module's own public classes: name, fields, first paragraph."""
    rows = []
    for name, cls in vars(module).items():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and not name.startswith("_"):
            fields = ", ".join(f"`{field}`" for field in getattr(cls, "__dataclass_fields__", {}))
            doc = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
            rows.append((f"`{name}`", fields, in_a_cell(doc)))
    return table(("name", "fields", "meaning"), rows)
