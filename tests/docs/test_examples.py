"""The examples of adoption run as they are written, and what they print is what they claim."""

import importlib
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

NOTHING_PLAYED = """\
  engines built: 0
  environments built: 0
  schedulers built: 0
  calls to the real scheduler: none
  calls answered from the recording: {answered}
  calls suppressed: {suppressed}
  recording: none"""


@pytest.fixture
def printed(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """What the example prints, by line."""
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.import_module(request.param).main(["--dump-dir", str(tmp_path / "recording")])
    return capsys.readouterr().out.splitlines()


def values(lines: list[str], mode: str) -> list[str]:
    """The lines of one mode, without its name."""
    return [line.removeprefix(f"{mode} ") for line in lines if line.startswith(f"{mode} ")]


def ledgers(lines: list[str]) -> list[str]:
    return [text.strip("\n").split("\nmock ")[0] for text in "\n".join(lines).split("Ledger\n")[1:]]


@pytest.mark.parametrize("printed", ["single_controller"], indirect=True)
def test_single_controller(printed: list[str]) -> None:
    dumped, replayed = ledgers(printed)
    assert "  schedulers built: 1\n  calls to the real scheduler: get_batch 3\n" in dumped
    assert dumped.endswith(", recorded_steps 3")
    assert replayed == NOTHING_PLAYED.format(answered="get_batch 3", suppressed="close 1")
    assert values(printed, "mock") == values(printed, "dump")
    assert len(values(printed, "mock")) == 3


@pytest.mark.parametrize("printed", ["async_scheduler"], indirect=True)
def test_async_scheduler(printed: list[str]) -> None:
    dumped, replayed = ledgers(printed)
    assert "  schedulers built: 1\n  calls to the real scheduler: get_batch 4, suspend 2, update_weights 2\n" in dumped
    assert dumped.endswith(", recorded_steps 4")
    assert replayed == NOTHING_PLAYED.format(answered="get_batch 4", suppressed="close 1, suspend 2, update_weights 2")
    assert values(printed, "mock") == values(printed, "dump")


@pytest.mark.parametrize("printed", ["padded_tensors"], indirect=True)
def test_padded_tensors(printed: list[str]) -> None:
    dumped, replayed = ledgers(printed)
    assert "  schedulers built: 1\n  calls to the real scheduler: get_batch 1\n" in dumped
    assert replayed == NOTHING_PLAYED.format(answered="get_batch 1", suppressed="close 1")
    assert values(printed, "mock") == values(printed, "dump")
    assert values(printed, "mock")[0].endswith(", 'prompt-1', 'prompt-1', 'prompt-1', 'prompt-1']")


@pytest.mark.parametrize("printed", ["one_per_rank"], indirect=True)
def test_one_per_rank(printed: list[str]) -> None:
    pattern = re.compile(r"(dump|mock) rank (\d) of (\d): (\d) rows, reward (\d+\.\d{9}), schedulers built (\d)")
    found = [pattern.fullmatch(line).groups() for line in printed]
    assert [(*line[:4], line[5]) for line in found] == [
        *(("dump", str(rank), "4", "4", "1") for rank in range(4)),
        *(("mock", str(rank), "2", "8", "0") for rank in range(2)),
    ]
    recorded, replayed = ([float(line[4]) for line in found if line[0] == mode] for mode in ("dump", "mock"))
    assert replayed == pytest.approx([recorded[0] + recorded[1], recorded[2] + recorded[3]], abs=3e-9)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_marks_the_two_lines_of_adoption(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert [text.count(f"# Adoption, line {number}: ") for number in (1, 2)] == [1, 1]


def test_every_example_is_tested() -> None:
    assert NAMES == ["async_scheduler", "one_per_rank", "padded_tensors", "single_controller"]
