"""Programs: the library names one, by default, and works with any other that keeps the protocol."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import mock_scheduler
from mock_scheduler.alignment.minimise.space import build_space
from mock_scheduler.alignment.plan.interpreters import Interpreter
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.alignment.plan.planned_run import AlignPlan
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.launcher import plan_launch
from mock_scheduler.program import find_program, import_program, load_config
from pipelines.program import PROGRAM as PIPELINE
from tests.other_program import PROGRAM, OtherConfig

TP2 = "parallel.tensor_model_parallel_size=2"


def write(folder: Path, text: str = "", *, name: str = "tests.other_program:PROGRAM") -> ConfigSource:
    (folder / "other.yaml").write_text(f"program: {name}  # not the pipeline\n{text}", encoding="utf-8")
    return ConfigSource(config_name="other", config_path=str(folder))


def plan(folder: Path, text: str) -> AlignPlan:
    source = write(folder, text)
    program = find_program(source.config_name, source.config_path)
    own = Interpreter(path=sys.executable, versions={}, packages={}, env={}, sources=())
    return plan_alignment(
        program.build_loader(source.config_name, source.config_path),
        program=program,
        overrides=[],
        output_dir=folder / "align",
        read_interpreter=lambda python: own,
    )


def test_the_library_names_the_pipelines_in_one_line() -> None:
    """Else a module of the library would know the first of its users, and nobody's program could stand beside it."""
    root = Path(mock_scheduler.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<!\.)\bpipelines\b", line)  # a package of another's may have the name
    ]
    assert found == ['config/locating.py: DEFAULT_PROGRAM = "pipelines.program:PROGRAM"']


def test_a_configuration_that_names_no_program_is_the_pipelines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("exp_name: x\n# program: other\n", encoding="utf-8")
    assert find_program("run", tmp_path) is PIPELINE
    assert find_program("run.yaml", tmp_path) is PIPELINE
    assert find_program("missing", tmp_path) is PIPELINE  # whose loader says that there is no such file


def test_the_pipeline_may_be_named_and_the_key_is_not_its_own(tmp_path: Path) -> None:
    source = write(tmp_path, "exp_name: x\n", name="pipelines.program:PROGRAM")
    assert find_program("other", tmp_path) is PIPELINE
    assert "program" not in load_config(source).model_dump()


def test_a_configuration_names_another_program_whose_schema_checks_it(tmp_path: Path) -> None:
    source = write(tmp_path, "sequence_length: 64\n")
    assert load_config(source) == OtherConfig(program="tests.other_program:PROGRAM", sequence_length=64)
    write(tmp_path, "sequence_lenght: 64\n")
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert "sequence_lenght: unknown key; nearest known key: sequence_length; known keys of" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:PROGRAM", "cannot be imported: No module named 'no'; write it as module:NAME"),
        ("tests.other_program:MISSING", "is no program: tests.other_program has no MISSING that is one"),
        ("tests.other_program:NO_PROGRAM", "is no program: tests.other_program has no NO_PROGRAM that is one"),
        ("tests.other_program", "is no program: tests.other_program has no name that is one"),
    ],
)
def test_what_is_no_program_is_refused_with_the_file_that_names_it(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, name=name)
    with pytest.raises(ConfigError) as caught:
        find_program("other", tmp_path)
    assert str(caught.value) == f"{tmp_path}/other.yaml: program {name!r} {message}"
    with pytest.raises(ConfigError) as caught:
        import_program(name)
    assert str(caught.value) == f"{name!r} {message}"


def test_an_alignment_of_another_program_is_planned_with_its_own_entry_and_keys(tmp_path: Path) -> None:
    planned = plan(tmp_path, f"align: {{candidates: [{{name: tp2, overrides: [{TP2}]}}]}}\n")
    baseline, tp2 = planned.runs
    assert [run.entry for run in planned.runs] == ["tests.other_program"] * 2
    assert (baseline.layout, tp2.layout) == ("tp1 pp1 dp1", "tp2 pp1 dp1")
    assert tp2.changes.layout == ("parallel.tensor_model_parallel_size",)
    assert tp2.must_be_exact
    assert not any("checkpoint_config" in override for override in tp2.overrides)
    source = ConfigSource(config_name="other", config_path=str(tmp_path), overrides=tp2.overrides)
    launch = plan_launch(tp2.config, PROGRAM.arguments(tp2.entry, source), python="python")
    folder = str(tmp_path / "align" / "tp2")
    assert launch.argv[-6:] == ("-m", "tests.other_program", "--tp", "2", "--out", folder)


def test_what_a_program_cannot_offer_is_said(tmp_path: Path) -> None:
    source = write(tmp_path)
    config = load_config(source)
    with pytest.raises(ConfigError, match=r"^runs of tests\.other_program cannot be reduced: it does not say how$"):
        build_space(PROGRAM, config, config, CandidateConfig(name="x"))
