"""A finished alignment answers again without a comparison, unless anything that the answer rests on has changed."""

import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.alignment.prove import alignment as runner
from mock_scheduler.support.digests import open_sealed, seal
from mock_scheduler.support.files import save_json
from mock_scheduler.verdict.compare_runs import judge_runs
from tests.alignment.test_align import CONFIG, Bench, FakeLauncher, write_results


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A folder with a finished alignment in it."""
    bench = Bench(tmp_path)
    bench.write(CONFIG.format(output_dir=tmp_path / "out dir=1"))
    assert bench.align(FakeLauncher()) == 0
    return bench


@pytest.fixture
def compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The candidates that are compared from now on."""
    names: list[str] = []

    def count(*runs: Any, **options: Any) -> Any:
        names.append(runs[1].name)
        return judge_runs(*runs, **options)

    monkeypatch.setattr(runner, "judge_runs", count)
    return names


def report(bench: Bench) -> str:
    """The report at the end of what was printed."""
    return bench.output.getvalue().rpartition("\nAlignment of ")[2]


def test_the_answer_is_the_first_one_and_nothing_is_compared(bench: Bench, compared: list[str], tmp_path: Path) -> None:
    first, result = report(bench), (bench.root / "align.json").read_bytes()
    bench.output = io.StringIO()
    launcher = FakeLauncher()
    copies = tmp_path / "copy.json", tmp_path / "copy.html"
    assert bench.align(launcher, json_path=copies[0], html_path=copies[1]) == 0
    assert (compared, launcher.started) == ([], [])
    assert report(bench).partition("\nJSON copy")[0].split("\n\npage")[0] == first.split("\n\npage")[0]
    assert "every comparison is taken again too" in bench.output.getvalue()
    assert copies[0].read_bytes() == result
    assert copies[1].read_bytes() == (bench.root / "align.html").read_bytes()


def flip_a_bit(path: Path) -> None:
    """Change a tensor's last byte, and put the time of its content back."""
    state, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def trace_file(bench: Bench, name: str) -> Path:
    return next((bench.root / name / "trace").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "compared_again"),
    [
        (lambda bench: flip_a_bit(trace_file(bench, "tp2")), True),
        (lambda bench: trace_file(bench, "same").touch(), True),
        (lambda bench: (bench.root / "tp2" / "trace" / "new.txt").write_text("new"), True),
        (lambda bench: (bench.root / "align.json").write_text("{}"), True),
        (lambda bench: (bench.root / "answer.json").write_text("{}"), True),
        (lambda bench: (bench.root / "answer.json").unlink(), True),
        (lambda bench: (bench.root / "align.junit.xml").write_text("a report of another command"), False),
    ],
)
def test_every_changed_file_of_the_answer_is_found(
    bench: Bench, compared: list[str], change: Callable[[Bench], object], compared_again: bool
) -> None:
    change(bench)
    bench.align(FakeLauncher())
    assert bool(compared) is compared_again


def test_a_flipped_bit_is_still_an_error_of_its_file(bench: Bench) -> None:
    flip_a_bit(trace_file(bench, "tp2"))
    assert bench.align(FakeLauncher()) == 3
    found = json.loads((bench.root / "align.json").read_text())["candidates"][1]
    assert (found["verdict"], "CRC-32" in found["reason"]) == ("incomparable", True)


@pytest.mark.parametrize(
    "override", ["align.tolerance.gradient=0.1", "align.proofs.noise=always", "align.candidates=[{name: same}]"]
)
def test_another_question_has_another_answer(bench: Bench, compared: list[str], override: str) -> None:
    bench.align(FakeLauncher(), override)
    assert compared


def test_an_answer_that_somebody_else_wrote_is_none(bench: Bench, compared: list[str]) -> None:
    """Its digest proves nothing, since whoever writes the file can make it: only this user's key does."""
    document = open_sealed((bench.root / "answer.json").read_bytes())
    document["view"]["headline"] = "all pass"
    save_json(bench.root / "answer.json", seal(document))
    bench.align(FakeLauncher())
    assert compared
    assert "all pass" not in report(bench)


def test_a_verdict_without_a_proof_that_failed_is_no_answer_for_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(CONFIG.format(output_dir=tmp_path / "out dir=1"))
    rounded = partial(write_results, gradient=1.0 + 2**-23)
    failing = FakeLauncher({"tp2": rounded, "emulated-tp2": lambda run: 137})
    assert bench.align(failing) == 0
    assert json.loads((bench.root / "align.json").read_text())["candidates"][1]["verdict"] == "rounding"
    again = FakeLauncher({"tp2": rounded, "emulated-tp2": partial(write_results, gradient=1.0 + 2**-22)})
    assert bench.align(again) == 1
    assert [run.name for run in again.started if run.name == "emulated-tp2"] == ["emulated-tp2"]


def test_a_file_that_changed_while_others_were_compared_leaves_no_answer(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(CONFIG.format(output_dir=tmp_path / "out dir=1"))

    def damage(run: Any) -> int:
        code: int = write_results(run)
        flip_a_bit(trace_file(bench, "same"))
        return code

    bench.align(FakeLauncher({"tp2": damage}))
    assert not (bench.root / "answer.json").exists()
