"""Compares a step of two or three debug dumps, and reports it as text, in NexRL's layout, and as JSON.

Contract: the JSON is valid and bounded: numbers that JSON does not have are texts, and of a section's comparisons at
most ``MAX_JSON_ITEMS`` are in it, those that do not hold first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.nexrl.comparison.pairing import Item, missing
from mock_scheduler.adapters.nexrl.comparison.sections import Dumps, Section, SectionMaker, find_place_counts
from mock_scheduler.adapters.nexrl.comparison.values import MISSING, Difference, Tolerance
from mock_scheduler.adapters.nexrl.names import check_step, find_steps
from mock_scheduler.errors import ExitCode, TraceError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import printable

MAX_JSON_ITEMS = 1000
MAX_LINES = 20
_WIDTH = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of a step's comparison. ``num_ranks``, ``num_micros``: numbers compared."""

    step: int
    dumps: Dumps
    tolerance: Tolerance
    num_ranks: int
    num_micros: int
    sections: tuple[Section, ...]

    def items(self) -> Iterator[tuple[Section, Item]]:
        """Every comparison, in order."""
        for section in self.sections:
            for item in section.items:
                yield section, item

    def first_failure(self, *, missing_too: bool = True) -> tuple[Section, Item] | None:
        """The first comparison that does not hold, in the order of training: by update, then section."""
        failures = [
            (section, item)
            for section, item in self.items()
            if not item.difference.is_ok and (missing_too or item.difference.status not in MISSING)
        ]
        return min(failures, key=lambda failure: failure[1].update, default=None)

    @property
    def num_compared(self) -> int:
        """Comparisons of values, of one element at least."""
        return sum(item.difference.num_compared > 0 for _, item in self.items())

    @property
    def exit_code(self) -> ExitCode:
        """1: values differ; 3: nothing differs, but something is missing, or nothing was compared; else 0."""
        if self.first_failure(missing_too=False) is not None:
            return ExitCode.DIVERGED
        is_complete = self.first_failure() is None and self.num_compared > 0
        return ExitCode.ALIGNED if is_complete else ExitCode.INCOMPARABLE


def compare_dumps(
    self_hosted_dir: Path | str,
    remote_api_dir: Path | str | None = None,
    weaver_dir: Path | str | None = None,
    step: int = 1,
    num_ranks: int | None = None,
    num_micros: int | None = None,
    *,
    tolerance: Tolerance = Tolerance(),  # noqa: B008 - immutable
) -> StepReport:
    """Compare one step. ``num_ranks``, ``num_micros``: how many there must be; None: as many as there are.

    Raises ``StepNotFoundError`` listing the steps of a folder without the step, ``TraceError`` for a folder that
    is not there or a file that cannot be read.
    """
    dumps = Dumps(
        self_hosted=Path(self_hosted_dir),
        remote_api=None if remote_api_dir is None else Path(remote_api_dir),
        weaver=None if weaver_dir is None else Path(weaver_dir),
    )
    for name, folder in dumps.all().items():
        if not folder.is_dir():
            raise TraceError(f"the {name} dump {folder} is no folder; give a run's debug.dump_dir")
        check_step(step, find_steps(folder), f"the {name} dump {folder}")
    sections = tuple(SectionMaker(dumps=dumps, step=step, tolerance=tolerance).sections())
    ranks, micros = find_place_counts(dumps, step)
    counts = _count_section({"ranks": (num_ranks, ranks), "micro-batches of a rank": (num_micros, micros)})
    return StepReport(
        step=step,
        dumps=dumps,
        tolerance=tolerance,
        num_ranks=num_ranks or ranks,
        num_micros=num_micros or micros,
        sections=(*counts, *sections),
    )


def _count_section(counts: dict[str, tuple[int | None, int]]) -> tuple[Section, ...]:
    """A section for given numbers that differ from those in the dumps."""
    items = [
        missing("dumps", name, in_first=True, detail=f"{given} were asked for, and the dumps hold {found}")
        for name, (given, found) in counts.items()
        if given is not None and given != found
    ]
    return (Section(name="RANKS_AND_MICROBATCHES", title="Number", items=tuple(items)),) if items else ()


def render_report(report: StepReport) -> str:
    """The whole report of a step, ending with its verdict."""
    lines = ["=" * _WIDTH, f"Debug Dump Comparison Report - Step {report.step}", "=" * _WIDTH, "", "Directories:"]
    lines += [f"  {f'{name}:':<12} {folder}" for name, folder in report.dumps.all().items()]
    lines += ["", f"Comparing: {report.num_ranks} ranks × {report.num_micros} microbatches"]
    for section in report.sections:
        lines += ["", *_render_section(section)]
    return "\n".join(map(printable, [*lines, "", *describe_verdict(report)]))


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
