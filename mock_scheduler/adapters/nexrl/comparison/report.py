"""The comparison of debug dumps as text, in NexRL's layout, and as JSON.

Contract: the JSON is valid and bounded: numbers that JSON does not have are texts, and of a section's comparisons at
most ``MAX_JSON_ITEMS`` are in it, those that do not hold first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mock_scheduler.adapters.nexrl.comparison.dumps import StepReport
from mock_scheduler.adapters.nexrl.comparison.pairing import Item
from mock_scheduler.adapters.nexrl.comparison.sections import Section
from mock_scheduler.adapters.nexrl.comparison.values import MISSING, Difference
from mock_scheduler.errors import ExitCode
from mock_scheduler.support.digests import JSON

MAX_JSON_ITEMS = 1000
MAX_LINES = 20
_WIDTH = 80


def render_report(report: StepReport) -> str:
    """The whole report of a step, ending with its verdict."""
    lines = ["=" * _WIDTH, f"Debug Dump Comparison Report - Step {report.step}", "=" * _WIDTH, "", "Directories:"]
    lines += [f"  {f'{name}:':<12} {folder}" for name, folder in report.dumps.all().items()]
    lines += ["", f"Comparing: {report.num_ranks} ranks × {report.num_micros} microbatches"]
    for section in report.sections:
        lines += ["", *_render_section(section)]
    return "\n".join([*lines, "", *describe_verdict(report)])


def describe_verdict(report: StepReport) -> list[str]:
    """One line on the step, and one on where it first went wrong."""
    failures = [item for _, item in report.items() if not item.difference.is_ok]
    num_missing = sum(item.difference.status in MISSING for item in failures)
    total = sum(1 for _ in report.items())
    found = report.first_failure(missing_too=report.exit_code != ExitCode.DIVERGED)
    counts = f"{total - len(failures)} of {total} comparisons hold"
    if report.exit_code == ExitCode.ALIGNED:
        is_identical = all(item.difference.status == "identical" for _, item in report.items())
        worst = max((item.difference.max_abs or 0.0 for _, item in report.items()), default=0.0)
        how = "identical to the bit" if is_identical else f"within the tolerance, largest difference {worst:.6e}"
        return [f"Verdict: {'identical' if is_identical else 'close'} - all {total} comparisons are {how}"]
    if report.exit_code == ExitCode.DIVERGED:
        verdict = f"Verdict: different - {counts}, {len(failures) - num_missing} do not, {num_missing} are missing"
    elif found is None:
        return ["Verdict: nothing compared - give --weaver_dir or --remote_api_dir a dump with the same data"]
    else:
        verdict = f"Verdict: incomplete - {counts}, {num_missing} are missing"
    assert found is not None  # there is a failure
    section, item = found
    return [verdict, f"First: {section.name}, {_line(item).strip()}"]


def _render_section(section: Section) -> list[str]:
    lines = [f"--- {section.name} ---", *(f"  {note}" for note in section.notes)]
    if not section.items:
        return lines
    lines += [f"Total comparisons: {section.num_places or len(section.items)}", f"Values: {_count_statuses(section)}"]
    shown = _choose(section.items, MAX_LINES)
    lines += ["", f"{section.title} differences{_across(section)}:", *map(_line, shown)]
    if len(shown) < len(section.items):
        lines.append(f"  ... and {len(section.items) - len(shown)} more, which differ less or not at all")
    return lines + _statistics(section)


def _across(section: Section) -> str:
    return " across ranks/micros" if section.name.endswith("_ALL") else ""


def _count_statuses(section: Section) -> str:
    """``46 identical, 2 different``."""
    counts: dict[str, int] = {}
    for item in section.items:
        counts[item.difference.status] = counts.get(item.difference.status, 0) + 1
    return ", ".join(f"{count} {_WORDS[status]}" for status, count in counts.items())


_WORDS = {
    "identical": "identical",
    "close": "within the tolerance",
    "different": "different",
    "dtype": "of two dtypes",
    "shape": "of two shapes",
    "unusable": "unusable",
    "missing_first": "missing in the first dump",
    "missing_second": "missing in the second dump",
}


def _choose(items: Sequence[Item], limit: int) -> list[Item]:
    """All where there are few; else those that do not hold, then the largest, in their own order."""
    if len(items) <= limit:
        return list(items)
    ranked = sorted(range(len(items)), key=lambda index: _rank(items[index].difference))
    return [items[index] for index in sorted(ranked[:limit])]


def _rank(difference: Difference) -> tuple[bool, float]:
    # A difference is never NaN: NaN against a number counts as infinite.
    return difference.is_ok, -(math.inf if difference.max_abs is None else difference.max_abs)


def _line(item: Item) -> str:
    difference = item.difference
    mark = "✓" if difference.is_ok else "✗"
    parts = [f"  {item.place} {item.name}: {mark}"]
    if difference.max_abs is not None:
        parts.append(f"diff={difference.max_abs:.6e}")
    if difference.num_compared > 1 and difference.mean_abs is not None:
        parts.append(f"mean={difference.mean_abs:.6e}")
    if difference.max_ulp:
        parts.append(f"ulp={difference.max_ulp}")
    if difference.num_nan_mismatches:
        parts.append(f"NaN against a number: {difference.num_nan_mismatches}")
    if difference.status not in ("identical", "close", "different"):
        parts.append(_WORDS[difference.status])
    if difference.detail:
        parts.append(f"({difference.detail})")
    if item.where:
        parts.append(f"at {item.where}")
    return " ".join(parts)


def _statistics(section: Section) -> list[str]:
    values = [item.difference.max_abs for item in section.items if item.difference.max_abs is not None]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    return [
        "",
        "Diff statistics:",
        f"  max: {max(values):.6e}",
        f"  min: {min(values):.6e}",
        f"  mean: {math.fsum(finite) / len(finite):.6e}",
    ]


def report_as_json(report: StepReport) -> dict[str, JSON]:
    """The report of a step; directories are null where they were not given."""
    dumps = report.dumps
    return {
        "step": report.step,
        "self_hosted_dir": str(dumps.self_hosted),
        "remote_api_dir": None if dumps.remote_api is None else str(dumps.remote_api),
        "weaver_dir": None if dumps.weaver is None else str(dumps.weaver),
        "num_ranks": report.num_ranks,
        "num_micros": report.num_micros,
        "tolerance": {"atol": report.tolerance.atol, "rtol": report.tolerance.rtol},
        "exit_code": int(report.exit_code),
        "verdict": describe_verdict(report),
        "sections": [_section_as_json(section) for section in report.sections],
    }


def _section_as_json(section: Section) -> dict[str, JSON]:
    kept = _choose(section.items, MAX_JSON_ITEMS)
    return {
        "name": section.name.lower(),
        "notes": list(section.notes),
        "num_places": section.num_places,
        "num_comparisons": len(section.items),
        "num_left_out": len(section.items) - len(kept),
        "comparisons": [_item_as_json(item) for item in kept],
    }


def _item_as_json(item: Item) -> dict[str, JSON]:
    difference = item.difference
    return {
        "place": item.place,
        "name": item.name,
        "status": difference.status,
        "num_compared": difference.num_compared,
        "max_abs": _json_number(difference.max_abs),
        "mean_abs": _json_number(difference.mean_abs),
        "max_ulp": difference.max_ulp,
        "num_nan_mismatches": difference.num_nan_mismatches,
        "where": item.where,
        "detail": difference.detail,
    }


def _json_number(value: float | None) -> JSON:
    return "Infinity" if value is not None and math.isinf(value) else value
