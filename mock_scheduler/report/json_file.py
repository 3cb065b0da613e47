"""Writes results of ``mock-scheduler align``, ``compare`` and ``replicas`` as files of strict JSON.

Contract: one object, ``format_version`` 3, and in it, by command,

- ``align``: ``config_name``, ``output_dir``, ``recording_dir``, ``exit_code``, ``module``, ``bounds``, ``baseline``
  (a run), ``times`` (null until it has ended), ``candidates`` and ``report``.
- ``compare``: ``exit_code``, ``bounds``, ``baseline`` and ``candidate`` (``name``, ``path``, ``kind``, ``level``,
  ``run``), ``recordings`` (null, or as ``mock-scheduler diff --json``) and all of a verdict.
- ``replicas``: ``exit_code``, ``path``, ``steps``, ``num_tensors``, ``num_copies``, ``conflicts``,
  ``ledgers`` and ``unmatched`` (chosen kinds and patterns without a tensor).

``verdict_json`` describes a verdict, and how lists are bounded.

A candidate of ``align`` has ``name``, ``overrides``, ``layout``, ``log_path``, ``run``, all of a verdict, and

- ``entry``, ``module``, ``changes``, ``versions``: as in ``verdict.results.CandidateResult``;
- ``start``: null, or what an attached run started from, as in ``trace.start_report.StartReport``, with ``text``;
- ``emulated``: null, or all of the verdict against the reference that adds in its order;
- ``localisation``: null, or as in ``verdict.localisation.Localisation``, with ``sentence`` and ``command``;
- ``consequence``: null, or as in ``verdict.consequence.figures.Consequence``, with ``text``;
- ``report``: the texts of page and terminal, as in ``report.alignment.view.CandidateView``.

``report`` of the whole is ``report.alignment.view.AlignmentView`` without its candidates. Both lack what is read from
folders (curves, error maps, environments, samples) until the alignment has ended, since the file is written many times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mock_scheduler.errors import UnwrittenError
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison_json import bounded, bounds_to_json, conflict_to_json, ledger_to_json
from mock_scheduler.report.recording.diff import differences_to_json
from mock_scheduler.report.verdict_json import consequence_to_json, localisation_to_json, verdict_to_json
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import dataclass_to_json, to_json
from mock_scheduler.support.files import save_json
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult, ComparisonResult, ReplicaResult

FORMAT_VERSION = 3


def save_result(result: AlignmentResult, view: AlignmentView, path: Path) -> None:
    """Write ``result``, and ``view`` of it, to ``path``, whole or not at all.

    Raises ``AlignmentError`` where it cannot.
    """
    _save(result_to_json(result, view), path)


def save_comparison(result: ComparisonResult, path: Path) -> None:
    """Write ``result`` to ``path``, whole or not at all; raises ``AlignmentError`` where it cannot."""
    _save(comparison_to_json(result), path)


def save_replicas(result: ReplicaResult, path: Path) -> None:
    """Write ``result`` to ``path``, whole or not at all; raises ``AlignmentError`` where it cannot."""
    _save(replicas_to_json(result), path)


def result_to_json(result: AlignmentResult, view: AlignmentView) -> dict[str, JSON]:
    """Returns the whole alignment run as JSON values."""
    report = dataclass_to_json(replace(view, candidates=()))
    del report["candidates"]
    return {
        "format_version": FORMAT_VERSION,
        "config_name": result.config_name,
        "output_dir": str(result.output_dir),
        "recording_dir": to_json(result.recording_dir),
        "exit_code": view.exit_code,
        "module": result.module,
        "bounds": bounds_to_json(result.bounds),
        "baseline": to_json(result.baseline),
        "times": to_json(result.times),
        "candidates": [_candidate(*pair) for pair in zip(result.candidates, view.candidates, strict=True)],
        "report": report,
    }


def comparison_to_json(result: ComparisonResult) -> dict[str, JSON]:
    """Returns the whole comparison as JSON values."""
    recordings, tensors = result.recordings, result.verdict.tensors
    return {
        "format_version": FORMAT_VERSION,
        "bounds": bounds_to_json(result.bounds, is_by_content=tensors is not None and tensors.is_by_content),
        "baseline": _side_to_json(result.baseline),
        "candidate": _side_to_json(result.candidate),
        **verdict_to_json(result.verdict),
        "exit_code": int(result.exit_code),
        "recordings": None if recordings is None else differences_to_json(recordings),
    }


def _side_to_json(side: ComparedInput) -> dict[str, JSON]:
    """Names a side by its location: the folder in which one of a bucket lay is gone."""
    content = dataclass_to_json(side)
    url = content.pop("url")
    if url is not None:
        content["path"] = url
        if isinstance(content["run"], dict):
            content["run"]["output_dir"] = url
    return content


def replicas_to_json(result: ReplicaResult) -> dict[str, JSON]:
    """Returns the findings in one run as JSON values."""
    return {
        "format_version": FORMAT_VERSION,
        "exit_code": int(result.exit_code),
        "path": result.path,
        **bounded("steps", result.steps),
        "num_tensors": result.num_tensors,
        "num_copies": to_json(result.num_copies),
        **bounded("conflicts", result.conflicts, conflict_to_json),
        **bounded("ledgers", result.ledgers, ledger_to_json),
        "unmatched": to_json(result.unmatched),
    }


def _candidate(candidate: CandidateResult, view: CandidateView) -> JSON:
    emulated, start = candidate.emulated, candidate.start
    return {
        "name": candidate.name,
        "overrides": list(candidate.overrides),
        "entry": candidate.entry,
        "module": candidate.module,
        "layout": candidate.layout,
        "log_path": to_json(candidate.log_path),
        "run": to_json(candidate.run),
        **verdict_to_json(candidate.verdict),
        "changes": list(candidate.changes),
        "versions": list(candidate.versions),
        "start": None if start is None else {**dataclass_to_json(start), "text": start.describe()},
        "emulated": None if emulated is None else verdict_to_json(emulated),
        "localisation": localisation_to_json(candidate.localisation),
        "consequence": consequence_to_json(candidate.consequence),
        "report": dataclass_to_json(view),
    }


def _save(content: Mapping[str, JSON], path: Path) -> None:
    try:
        save_json(path, content, sort_keys=False)
    except OSError as error:
        raise UnwrittenError(f"{path} cannot be written: {error.strerror}") from error
