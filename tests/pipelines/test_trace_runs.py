"""The trace of a run through its real entry; what cannot be traced ends the run and leaves nothing that looks whole."""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.trace.full.reader import open_trace
from tests.pipelines.tiny_runs import read_json, run_tiny, write_tiny_config


def run(folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and standard error of one run of two steps."""
    finished = run_tiny(write_tiny_config(folder), [f"output_dir={folder / 'run'}", *overrides])
    return finished.returncode, finished.stderr


def test_every_second_step_is_traced_with_its_rows_and_the_time_that_it_takes(tmp_path: Path) -> None:
    exit_code, errors = run(
        tmp_path,
        *("max_steps=3", "trace.level=full", "trace.dump_every_n_steps=2"),
        *("trace.kinds=[input,advantage,gradient,collective]", "trace.patterns=[tokens,advantages,*.linear_fc1.*]"),
    )
    assert exit_code == 0, errors
    with open_trace(tmp_path / "run" / "trace") as reader:
        assert reader.steps == (0, 2)
        for step in reader.steps:
            footer = reader.footer(step)
            assert len(footer.rows.identities) == 16
            first, second = tuple(range(8)), tuple(range(8, 16))
            assert footer.update_rows == (first, second, first, second)  # two epochs
            assert footer.ledgers["collective"]
            names = {(key.kind, key.name) for key in reader.keys(step)}
            assert {name for name in names if name[0] != "gradient"} == {
                ("input", "tokens"),
                ("advantage", "advantages"),
            }
            assert all(".linear_fc1." in name for kind, name in names if kind == "gradient")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert ["time/trace" in line for line in lines] == [True, False, True]


def test_a_pattern_that_selects_nothing_ends_the_run_after_its_first_traced_step(tmp_path: Path) -> None:
    exit_code, errors = run(tmp_path, "trace.level=full", "trace.patterns=[output_lair.*]")
    assert exit_code == 5, errors
    error = read_json(tmp_path / "run" / "error.json")
    assert error["type"] == "TraceError"
    assert "'output_lair.*' selects nothing: it matches none of " in error["message"]
    assert "output_layer.weight" in error["message"]
    assert not list((tmp_path / "run" / "trace").rglob("*.safetensors"))


def test_ranks_that_the_layout_does_not_have_end_the_run_before_a_model_is_built(tmp_path: Path) -> None:
    exit_code, errors = run(tmp_path, "trace.level=full", "trace.ranks=[1]")
    assert exit_code == 5, errors
    assert "trace.ranks has 1, but layout" in errors
    assert not (tmp_path / "run" / "trace").exists()
