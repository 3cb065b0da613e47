"""Reports an alignment to continuous integration: a short summary in plain text, and JUnit XML.

Contract: JUnit XML as Jenkins, GitLab and GitHub's actions read it: one ``testsuite`` named ``alignment``, one
``testcase`` for each candidate; ``failure`` where it is diverged or suspect, ``error`` where it could not be compared
or is unverified. Seconds are those of the candidate's run and of its own proofs. Characters outside of XML 1.0 are
replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from mock_scheduler.errors import UnwrittenError
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.text import list_some, on_one_line
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.verdicts import NOT_LOOKED_AT

_NUM_NAMES = 12
_FILES = {
    "page": "page", "result": "result", "junit": "JUnit XML", "JSON copy": "JSON copy", "HTML copy": "HTML copy",
}  # fmt: skip
_FAILURES = (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
_ERRORS = (VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED)
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def alignment_summary(view: AlignmentView, *, files: Mapping[str, Path]) -> str:
    """Write a few lines: how many candidates pass, each failing one with its reason, and the names of the others.

    ``files``: paths by their role; page, result, JUnit XML and copies are named.
    """
    lines = [f"alignment of {view.config_name}: {view.headline} (exit code {view.exit_code})"]
    for candidate in view.candidates:
        if not candidate.passes:
            lines.append(
                f"  {candidate.name}: {candidate.verdict.kind.value}: {on_one_line(candidate.verdict.headline)}"
            )
    for verdict, _ in view.counts:
        names = [item.name for item in view.candidates if item.verdict.kind is verdict and item.passes]
        if names:
            lines.append(f"  {verdict.value}: {list_some(names, _NUM_NAMES, ', ')}")
    lines += _list_unseen(view.candidates)
    lines += [f"{label:<10}{files[what]}" for what, label in _FILES.items() if what in files]
    return "\n".join(lines)


def _list_unseen(candidates: Sequence[CandidateView]) -> list[str]:
    """Write a line for each different thing that passing verdicts did not look at, with the candidates' names."""
    names: dict[str, list[str]] = {}
    for item in candidates:
        if item.passes and item.verdict.unseen:
            names.setdefault(item.verdict.unseen, []).append(item.name)
    return [f"  {NOT_LOOKED_AT} in {list_some(own, _NUM_NAMES, ', ')}: {text}" for text, own in names.items()]


def write_junit(view: AlignmentView, path: Path) -> None:
    """Write the result as JUnit XML to ``path``, whole or not at all; raises ``AlignmentError`` where it cannot."""
    suite = _test_suite(view, _properties(view))
    ElementTree.indent(suite)
    try:
        with written_aside(path) as aside:
            ElementTree.ElementTree(suite).write(aside, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise UnwrittenError(f"{path} cannot be written: {error.strerror}") from error


def _test_suite(view: AlignmentView, properties: dict[str, str]) -> ElementTree.Element:
    total_s = sum(item.run.total_s for item in view.candidates) if view.total_s is None else view.total_s
    suite = ElementTree.Element(
        "testsuite",
        {
            "name": "alignment",
            "tests": str(len(view.candidates)),
            "failures": str(sum(item.verdict.kind in _FAILURES for item in view.candidates)),
            "errors": str(sum(item.verdict.kind in _ERRORS for item in view.candidates)),
            "skipped": "0",
            "time": f"{total_s:.3f}",
        },
    )
    listed = ElementTree.SubElement(suite, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(listed, "property", {"name": name, "value": _xml_text(value)})
    for candidate in view.candidates:
        _add_case(suite, candidate, view.config_name)
    return suite


def _add_case(suite: ElementTree.Element, candidate: CandidateView, config_name: str) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "name": _xml_text(candidate.name),
            "classname": _xml_text(f"alignment.{config_name}"),
            "time": f"{candidate.run.total_s:.3f}",
        },
    )
    if not candidate.passes:
        kind = "failure" if candidate.verdict.kind in _FAILURES else "error"
        attributes = {
            "type": candidate.verdict.kind.value,
            "message": _xml_text(on_one_line(candidate.verdict.headline)),
        }
        ElementTree.SubElement(case, kind, attributes).text = _xml_text(_details(candidate))
    unseen = f"{NOT_LOOKED_AT}: {candidate.verdict.unseen}\n" if candidate.verdict.unseen else ""
    proofs = "\n".join(f"{proof.name}: {proof.outcome}: {proof.text}" for proof in candidate.proofs)
    ElementTree.SubElement(case, "system-out").text = _xml_text(
        f"{candidate.verdict.kind.value}, proved by {candidate.verdict.proved_by}\n{candidate.setup.layout}\n"
        f"{unseen}{proofs}\n"
    )


def _details(candidate: CandidateView) -> str:
    """Write the sentence, the reason, and where the traces are."""
    lines = [
        candidate.verdict.headline,
        candidate.verdict.first_divergence,
        candidate.verdict.reason,
        candidate.consequence.text,
    ]
    lines += [f"open the traces: {candidate.origin.command}"] if candidate.origin.command else []
    lines += [f"its output: {candidate.run.log_path}"] if candidate.run.log_path else []
    return "\n".join(dict.fromkeys(filter(None, lines)))


def _properties(view: AlignmentView) -> dict[str, str]:
    """The configuration's name and the versions of the baseline; of each candidate, its own where they are others."""
    versions = {f"version.{name}": version for name, version in view.packages if version != "absent"}
    others = {
        f"versions.{item.name}": "; ".join(item.setup.versions) for item in view.candidates if item.setup.versions
    }
    return {"config": view.config_name, "baseline.layout": view.baseline_layout, **versions, **others}


def _xml_text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
