"""Compares two runs, traces, metrics or recordings from Python, and checks the copies within one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.pages import render_summary
from mock_scheduler.errors import ConfigError
from mock_scheduler.report.comparison.page import write_comparison_page
from mock_scheduler.report.json_file import save_comparison
from mock_scheduler.run_folder.inputs import parse_selection
from mock_scheduler.support.text import printable
from mock_scheduler.verdict import verdict as facts
from mock_scheduler.verdict.compare_runs import compare_paths
from mock_scheduler.verdict.replicas import check_replicas_at
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.wording.coverage import describe_unseen
from mock_scheduler.verdict.wording.verdicts import (
    LEGEND,
    NOT_LOOKED_AT,
    TONES,
    describe_proved_by,
    describe_reason,
    describe_smallest_error,
    write_headline,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(facts.Verdict):
    """Says whether a candidate computes the same as its baseline, and on which facts the answer rests.

    It holds facts alone; ``describe`` and ``str`` put them into words, and a notebook shows them.

    Attributes:
        kind: ``identical``, ``identical (emulated)``, ``rounding``, ``suspect``, ``diverged``, ``incomparable`` or
            ``unverified``, as a ``VerdictKind``.
        why: The reason, as facts.
        first: The earliest divergence in the order of computation, with step, update, kind and name of the tensor, its
            value and bound, sample, token and ranks; ``None`` where nothing diverged.
        metrics, tensors: Everything compared; ``None`` where there was none.
        bounds: How far the candidate may be from the baseline, with the source of each bound.
        suspicions, tests: Systematic differences within the bounds, and the tests for them.
        unseen: Modules and parameters that the comparison did not look at; ``None`` where there are none.
        full_dump: After a comparison of sketches, the overrides of the full trace to take next.
        proofs: Of an alignment, strongest first; empty for a plain comparison.
        result: The judged comparison.
    """

    result: ComparisonResult

    @classmethod
    def of(cls, result: ComparisonResult) -> Verdict:
        """Make the verdict of a finished comparison."""
        values = {field.name: getattr(result.verdict, field.name) for field in fields(facts.Verdict)}
        return cls(**values, result=result)

    @property
    def headline(self) -> str:
        """Returns the verdict in one line of plain words."""
        return write_headline(self)

    def describe(self) -> str:
        """Returns the verdict in a few lines: kind, both sides, reason, and the smallest detectable error."""
        names = f"{self.result.candidate.location} against {self.result.baseline.location}"
        smallest = describe_smallest_error(self)
        found = [f"would have been found: {smallest}"] if smallest else []
        found += [f"{NOT_LOOKED_AT}: {text}" for text in [describe_unseen(self.unseen)] if text]
        return "\n".join(map(printable, [f"{self.kind.value}: {names}", describe_reason(self), *found]))

    def save_html(self, path: str | Path) -> None:
        """Write the comparison as one page that opens offline, whole or not at all; folders are made.

        Raises:
            AlignmentError: The page cannot be written.
        """
        write_comparison_page(self.result, Path(path))

    def save_json(self, path: str | Path) -> None:
        """Write every fact as one JSON object (``mock-scheduler compare --json``), whole or not at all.

        Raises:
            AlignmentError: The file cannot be written.
        """
        save_comparison(self.result, Path(path))

    def __str__(self) -> str:
        """Returns one line: the kind, and the headline."""
        return printable(f"{self.kind.value}: {self.headline}")

    def _repr_html_(self) -> str:
        smallest = describe_smallest_error(self)
        rows = [
            ("baseline", self.result.baseline.location),
            ("candidate", self.result.candidate.location),
            ("means", LEGEND[self.kind]),
            ("found", self.headline),
        ]
        rows += [("proved by", describe_proved_by(self))] if self.proofs else []
        rows += [("would have been found", smallest)] if smallest else []
        return render_summary(self.kind.value, rows, tone=TONES[self.kind])


def compare(
    baseline: str | Path,
    candidate: str | Path,
    *,
    steps: str | int | Iterable[int] | None = None,
    kinds: str | Sequence[str] = (),
    patterns: str | Sequence[str] = (),
    tolerance: Mapping[str, float] | None = None,
    noise: str | Path | Sequence[str | Path] = (),
    has_metrics: bool = True,
) -> Verdict:
    """Compare two finished runs, traces, metrics or recordings, and find the first place where they part.

    Nothing is run and nothing is written. Both sides may have been computed under any layout: tensors are merged from
    all ranks and paired by canonical names, and tokens by the identity of their row and the position in it.

    Args:
        baseline: A run's ``output_dir``, a trace folder, a ``metrics.jsonl`` or a recording: a path, or a URL such as
            ``s3://bucket/runs/base``.
        candidate: The side to judge, of the same kind.
        steps: Steps to compare: a text like ``"0-4,7,100-"``, a number or several; ``None``: all.
        kinds: Kinds of traced tensors, like ``["gradient", "parameter"]``, or one; empty: all.
        patterns: Globs of names, like ``["decoder.layers.3.*"]``, or one; empty: all.
        tolerance: Bounds of your own over the measured or theoretical ones: ``metric``, ``metric_floor``,
            ``activation``, ``gradient``, ``update``, as relative differences.
        noise: The ``noise.json`` of the baseline, or perturbed runs of it to measure its noise from.
        has_metrics: Whether the logged metrics of runs are compared too.

    Returns:
        The verdict. Its ``kind`` is ``incomparable`` where the two cannot be judged against each other.

    Raises:
        ConfigError: A side cannot be compared, both are of different kinds, or an option is wrong.
        AlignmentError: A run did not complete, or has no trace.
        TraceError, RecordingError: A file cannot be read, or has changed since it was written.
    """
    if not isinstance(tolerance, Mapping | None):
        raise ConfigError(f'tolerance: expected a mapping like {{"gradient": 1e-4}}, got {tolerance!r}')
    result = compare_paths(
        baseline,
        candidate,
        selection=_select(steps, kinds, patterns),
        tolerance=tuple(f"{name}={value!r}" for name, value in (tolerance or {}).items()),
        noise=(noise,) if isinstance(noise, str | Path) else tuple(noise),
        has_metrics=has_metrics,
    )
    return Verdict.of(result)


def check_replicas(
    run: str | Path,
    *,
    steps: str | int | Iterable[int] | None = None,
    kinds: str | Sequence[str] = (),
    patterns: str | Sequence[str] = (),
    verify: bool = False,
) -> ReplicaResult:
    """Check the copies within one run: ranks with a share in the same elements must hold the same bits.

    No second run is needed.

    Args:
        run: A run's ``output_dir`` with ``trace.level=full``, or its trace folder: a path or a URL.
        steps, kinds, patterns: As in ``compare``.
        verify: First read all of the trace and check every SHA-256.

    Returns:
        The conflicts, and how many copies were compared, by axis of the layout.

    Raises:
        ConfigError: There is no trace of whole tensors, or an option is wrong.
        TraceError: A file cannot be read, or has changed since it was written.
    """
    return check_replicas_at(run, selection=_select(steps, kinds, patterns), verify=verify)


def _select(
    steps: str | int | Iterable[int] | None, kinds: str | Sequence[str], patterns: str | Sequence[str]
) -> Selection:
    try:
        chosen = None if steps is None else StepRanges.parse(steps if isinstance(steps, str | int) else list(steps))
    except ValueError as error:
        raise ConfigError(f"steps: {error}") from error
    return parse_selection(
        steps=chosen,
        kinds=(kinds,) if isinstance(kinds, str) else kinds,
        patterns=(patterns,) if isinstance(patterns, str) else patterns,
    )
