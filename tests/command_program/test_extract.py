"""The diverged candidate of a command as a folder that shows it again, with the command's code and settings."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import yaml

from mock_scheduler.alignment.extract.extraction import Outcome
from mock_scheduler.alignment.extract.source import read_verdict
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.commands.extract import run_extract
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.run_folder.finished_run import load_batches
from tests.command_program import fake_training
from tests.command_program.simulated import TP2, Runs, write_config
from tests.command_program.test_align import QUICK, align
from tests.sharing import make_once


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An alignment with a planted fault, beside the command's code, a small file and a large one."""

    def make(folder: Path) -> dict[str, object]:
        shutil.copy(fake_training.__file__, folder / "fake_training.py")
        (folder / "small.json").write_text("{}", encoding="utf-8")
        (folder / "rows.bin").write_bytes(bytes((1 << 20) + 1))
        path = write_config(folder, {"fault": [TP2, "options.fault=scale"]}, align={"proofs": QUICK}, max_steps=3)
        align(path, Runs())
        return {}

    return make_once(tmp_path_factory, "extracted-command", make)[0] / "out" / "align"


def check(folder: Path, name: str) -> Outcome:
    """Runs the alignment of the folder in this process."""
    root = folder.parent / "checked"
    run_align(
        config_name="command",
        config_path=folder,
        overrides=(),
        options=AlignOptions(output_dir=root, run_stored_code=True),
        make_launch=Runs().make_launch,
        console=Console(file=io.StringIO(), width=120),
    )
    verdict, text = read_verdict(root, name)
    return Outcome(verdict=verdict, text=text, batches=load_batches(root / "baseline"))


def test_the_folder_shows_the_divergence_with_the_commands_own_code(finished: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    console = io.StringIO()
    assert run_extract(finished, "fault", output=small, check=check, console=Console(file=console, width=200)) == 0
    assert "reproduction: diverged" in console.getvalue()
    assert f"Show it with: bash {small}/reproduce.sh --run-stored-code" in " ".join(console.getvalue().split())
    names = sorted(str(path.relative_to(small)) for path in small.rglob("*") if path.is_file())
    assert names == [
        *("README.md", "code/fake.yaml", "code/fake_training.py", "code/small.json"),
        *("command.yaml", "reproduce.sh"),
    ]
    told = yaml.safe_load((small / "command.yaml").read_text(encoding="utf-8"))
    # The divergence is at the first of three steps, so the other two are left out; all places are in the folder.
    assert {key: told[key] for key in ("max_steps", "working_dir", "sources", "output_dir", "exp_name")} == {
        "max_steps": 1,
        "working_dir": "code",
        "sources": ["code"],
        "output_dir": "output",
        "exp_name": "fake-reproduction",
    }
    assert told["align"]["candidates"] == [
        {"name": "fault", "overrides": [TP2, "options.fault=scale"], "entry": None, "python": None, "exact": None}
    ]
    page = (small / "README.md").read_text(encoding="utf-8")
    assert "The extraction ran it. The verdict was diverged: " in page
    assert "the rows are those of there" in page
    assert "- `options.fault=scale`" in page
    assert f"| 0 | `{'0' * 16}` |" in page
    assert "  - `rows.bin`: 1.0 MiB" in page
    assert "align command --config-path .\n" in (small / "reproduce.sh").read_text(encoding="utf-8")


def test_what_does_not_diverge_again_is_no_reproduction_and_its_other_rows_are_said(
    finished: Path, tmp_path: Path
) -> None:
    def other(folder: Path, name: str) -> Outcome:
        return Outcome(verdict="identical", text="every bit is equal", batches={0: "1" * 64})

    with pytest.raises(AlignmentError) as caught:
        run_extract(finished, "fault", output=tmp_path / "small", check=other)
    assert str(caught.value) == (
        "the divergence does not show again: the reproduction is identical (every bit is equal). Likely causes:\n"
        "  - it read other rows than the alignment did, first at step 0\n"
        "  - files above 1 MiB were not copied: rows.bin\n"
        "  - its code, packages or machine are others, or it does not repeat itself (mock-scheduler doctor)"
    )
    assert not (tmp_path / "small").exists()


def test_a_later_step_may_be_asked_for_and_groups_may_not(finished: Path, tmp_path: Path) -> None:
    run_extract(finished, "fault", output=tmp_path / "small", step=1, is_checked=False)
    told = yaml.safe_load((tmp_path / "small" / "command.yaml").read_text(encoding="utf-8"))
    assert told["max_steps"] == 2
    assert "(`--no-check`)" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--step is 3; the baseline has steps 0, 1, 2$"):
        run_extract(finished, "fault", output=tmp_path / "other", step=3)
    with pytest.raises(ConfigError, match=r"^--groups cuts recorded rollouts, and a command reads its own rows"):
        run_extract(finished, "fault", output=tmp_path / "other", num_groups=1)


def test_nothing_of_a_received_alignment_is_copied_or_run_unasked(finished: Path, tmp_path: Path) -> None:
    received = tmp_path / "received"
    shutil.copytree(finished, received)
    for is_checked in (True, False):
        with pytest.raises(ConfigError) as caught:
            run_extract(received, "fault", output=tmp_path / "small", is_checked=is_checked)
        assert f"files to copy: sources = '{finished.parent.parent}'" in str(caught.value) or is_checked
        assert "--run-stored-code" in str(caught.value)
    assert not (tmp_path / "small").exists()
    run_extract(received, "fault", output=tmp_path / "small", is_checked=False, run_stored_code=True)
    assert (tmp_path / "small" / "code" / "fake_training.py").is_file()
