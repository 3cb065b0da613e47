"""Files of a received run that are no plain files: refused by name in an instant, with the exit code of bad input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.cli import main
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.files import find_noise, load_noise, save_noise
from mock_scheduler.errors import AlignmentError
from mock_scheduler.trace.shards import whole
from tests.trace.builders import NORM, entry, save

PART = "trace/step_000000/rank_00000.part_000.safetensors"
FILES = ("metrics.jsonl", "ledger.json", "run.json", "config.yaml", PART)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("precision: fp32\ntrace: {level: full}\n", encoding="utf-8")
        run = {"status": "completed", "layout": "tp1", "wall_s": 1.0, "rollout_s": 0.5, "batches": {"0": "x"}}
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
        (folder / "ledger.json").write_text('{"built": {}}', encoding="utf-8")
        (folder / "metrics.jsonl").write_text('{"step": 0, "metrics": {"a": 1.0}}\n', encoding="utf-8")
        save(folder / "trace", 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])
    return tmp_path


def link_out(path: Path) -> None:
    outside = path.with_name(f"outside_{path.name}")
    path.rename(outside)
    folder = path.parents[2] if "trace" in path.parts else path.parent
    path.symlink_to(outside.rename(folder.parent / outside.name))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_hole(path: Path) -> None:
    os.truncate(path, 100 * 2**30)


def link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("attack", [link_out, make_pipe, link_to_zeros, make_hole])
def test_a_file_that_is_none_ends_a_comparison_at_once(
    runs: Path, capsys: pytest.CaptureFixture[str], file: str, attack: Callable[[Path], None]
) -> None:
    attack(runs / "b" / file)
    assert main(["compare", str(runs / "a"), str(runs / "b")]) in (3, 5)
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert str(runs / "b") in said.replace("\n", "").replace("  ", "")


def test_a_trace_that_is_a_link_out_of_its_run_is_not_followed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "b" / "trace").rename(runs / "elsewhere")
    (runs / "b" / "trace").symlink_to(runs / "elsewhere")
    assert main(["compare", str(runs / "a"), str(runs / "b")]) == 5
    assert "is a link to" in capsys.readouterr().err


def test_bounds_found_beside_a_run_are_read_through_the_door(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "noise.json").touch()
    make_hole(runs / "noise.json")
    assert main(["compare", str(runs / "a"), str(runs / "b")]) == 3
    assert f"noise.json has {100 * 2**30} bytes" in capsys.readouterr().err.replace("\n", " ")


def link_away(path: Path, folder: Path) -> None:
    """The same content lies in another folder, so that whoever follows the link finds nothing wrong."""
    folder.mkdir(exist_ok=True)
    path.symlink_to(path.rename(folder / f"{path.parent.name}_{path.name}"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace"])
def test_neither_a_plot_nor_noise_is_made_through_a_link(
    runs: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(runs / "a", runs / "c")
    link_away(runs / "c" / name, runs / "private")
    page = runs / "page.html"
    if name == "metrics.jsonl":
        assert main(["plot", str(runs / "a"), str(runs / "c"), "-o", str(page)]) == 5
        assert not page.exists()
    assert main(["compare", str(runs / "a"), str(runs / "b"), "--noise", str(runs / "c")]) in (3, 5)
    assert f"{runs / 'c' / name} is a link to {runs / 'private'}" in capsys.readouterr().err.replace("\n  ", " ")


def test_noise_beside_a_run_is_no_link_and_names_no_trace_elsewhere(runs: Path) -> None:
    noise = measure_noise(runs / "a", [runs / "b"], seeds=[1])
    save_noise(noise, runs / "noise.json")
    found = find_noise(runs / "a")
    assert found is not None
    assert found.trace_dirs == (runs / "b" / "trace",)
    shutil.move(runs / "b", runs.parent / "elsewhere")
    save_noise(replace(noise, trace_dirs=(runs.parent / "elsewhere" / "trace",)), runs / "noise.json")
    assert load_noise(runs / "noise.json").trace_dirs == ()
    link_away(runs / "noise.json", runs.parent / "private")
    with pytest.raises(AlignmentError, match=r"noise\.json is a link to"):
        find_noise(runs / "a")
