"""An alignment for continuous integration: its summary by text, and JUnit XML as a parser reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mock_scheduler.errors import AlignmentError
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.ci import alignment_summary, write_junit
from mock_scheduler.verdict.results import AlignmentResult
from mock_scheduler.verdict.wording.verdicts import describe_reason
from tests.report.alignments import EVIL, SENTENCE, SUSPECT, command, make_result, no_run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignmentResult:
    return make_result(tmp_path_factory.mktemp("alignment"))


def read(result: AlignmentResult, path: Path) -> ElementTree.Element:
    write_junit(build_view(result), path)
    return ElementTree.parse(path).getroot()


def test_the_summary_names_every_candidate_and_the_reason_of_those_that_do_not_pass(result: AlignmentResult) -> None:
    files = {name: Path(f"/out/{name}") for name in ("page", "result", "recording", "runs", "junit")}
    assert alignment_summary(build_view(result, is_full=False), files=files) == (
        "alignment of lake: 3 of 7 candidates pass: 1 diverged, 1 suspect, 1 incomparable, 1 unverified, 1 rounding, "
        "1 identical (emulated), 1 identical (exit code 1)\n"
        f"  tp2.clip: diverged: {SENTENCE}\n"
        f"  dp2.clip: suspect: {SUSPECT}\n"
        f"  broken: incomparable: the run failed: {EVIL}\n"
        f"  loose: unverified: {describe_reason(result.candidates[6].verdict)}\n"
        "  rounding: dp2.plain\n"
        "  identical (emulated): tp2.plain\n"
        "  identical: pp2.plain\n"
        "page      /out/page\n"
        "result    /out/result\n"
        "JUnit XML /out/junit"
    )


def test_all_that_pass_are_two_lines(result: AlignmentResult) -> None:
    passing = replace(result, candidates=result.candidates[2:3])
    assert alignment_summary(build_view(passing, is_full=False), files={}) == (
        "alignment of lake: the one candidate passes: 1 identical (exit code 0)\n  identical: pp2.plain"
    )


def test_junit_counts_failures_and_errors(result: AlignmentResult, tmp_path: Path) -> None:
    suite = read(result, tmp_path / "junit.xml")
    assert (suite.tag, suite.attrib) == (
        "testsuite",
        {"name": "alignment", "tests": "7", "failures": "2", "errors": "2", "skipped": "0", "time": "128.000"},
    )
    cases = suite.findall("testcase")
    assert [(case.get("name"), [child.tag for child in case]) for case in cases] == [
        ("tp2.plain", ["system-out"]),
        ("tp2.clip", ["failure", "system-out"]),
        ("pp2.plain", ["system-out"]),
        ("dp2.plain", ["system-out"]),
        ("dp2.clip", ["failure", "system-out"]),
        ("broken", ["error", "system-out"]),
        ("loose", ["error", "system-out"]),
    ]
    assert {case.get("classname") for case in cases} == {"alignment.lake"}


def test_junit_has_seconds_reasons_and_what_opens_the_traces(result: AlignmentResult, tmp_path: Path) -> None:
    """A run of 10 s, two proofs of 1.5 s each and 12 s of localising."""
    suite = read(result, tmp_path / "junit.xml")
    diverged = suite.find("testcase[@name='tp2.clip']")
    assert diverged is not None
    assert diverged.get("time") == "25.000"
    failure = diverged.find("failure")
    assert failure is not None
    assert (failure.get("type"), failure.get("message")) == ("diverged", SENTENCE)
    assert failure.text is not None
    assert f"open the traces: {command(result)}" in failure.text
    broken = suite.find("testcase[@name='broken']")
    assert broken is not None
    assert broken.get("time") == "0.000"
    error = broken.find("error")
    assert error is not None
    assert error.get("message") == f"the run failed: {EVIL}"


def test_junit_has_versions_as_properties(result: AlignmentResult, tmp_path: Path) -> None:
    suite = read(result, tmp_path / "junit.xml")
    properties = {item.get("name"): item.get("value") for item in suite.findall("properties/property")}
    assert properties == {
        "config": "lake",
        "baseline.layout": "tp1 pp1 dp1",
        "version.torch": "2.13.0",
        "version.megatron-core": "0.16.1",
        "version.python": "3.11.9",
        "version.platform": "Linux-x86_64",
        "versions.loose": "torch 2.12.0 instead of 2.13.0",
    }


def test_characters_that_xml_does_not_have_are_replaced(result: AlignmentResult, tmp_path: Path) -> None:
    """A terminal's colours in an error made the whole file unreadable."""
    coloured = replace(result.candidates[5], verdict=no_run("\x1b[31mfailed\x1b[0m\x00"))
    suite = read(replace(result, candidates=(coloured,)), tmp_path / "junit.xml")
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("message") == "�[31mfailed�[0m�"


def test_a_file_that_cannot_be_written_is_named(result: AlignmentResult, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(AlignmentError) as caught:
        write_junit(build_view(result), tmp_path / "file" / "junit.xml")
    assert str(caught.value).startswith(f"{tmp_path / 'file' / 'junit.xml'} cannot be written")
    assert caught.value.exit_code == 5
