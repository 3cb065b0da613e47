"""Minimal reproductions: cut out of a finished alignment that fake runs left, and checked by a fake run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mock_scheduler.alignment.extract.entry import find_entry_files
from mock_scheduler.alignment.extract.extraction import Outcome, order_groups, run_reproduction
from mock_scheduler.alignment.plan.overrides import override_keys
from mock_scheduler.cli import main
from mock_scheduler.commands.extract import run_extract
from mock_scheduler.errors import AlignmentError, ConfigError, RecordingError, StepNotFoundError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.subset import load_train_step
from pipelines.config.loading import load_config
from tests.alignment.extract.alignments import (
    CONFIG,
    SAMPLE,
    SENTENCE,
    STEP,
    Alignment,
    FakeCheck,
    batch_of,
    extract,
    write_checkpoint,
)

OWN = ("mock_scheduler", "pipelines")


def values_of(folder: Path, *keys: str) -> list[object]:
    """Of the reproduction's configuration."""
    content = load_config("config", config_path=folder).model_dump(mode="json")
    found = []
    for key in keys:
        place = content
        for part in key.split("."):
            place = place[part]
        found.append(place)
    return found


SIZES = (
    "rollout_batch_size",
    "train_env_manager.num_env_groups",
    "training.global_batch_size",
    "training.micro_batch_size",
)


@pytest.fixture
def alignment(tmp_path: Path) -> Alignment:
    return Alignment(tmp_path)


def test_the_group_of_the_worst_sample_is_all_that_is_kept(alignment: Alignment) -> None:
    alignment.write()
    folder = extract(alignment)
    reader = RecordingReader(str(folder / "recording"))
    assert reader.steps() == {"train": [0]}
    expected = batch_of(*STEP).select([4, 5])
    found = load_train_step(reader, 0)
    assert [str(row) for row in found.identities] == [str(row) for row in expected.identities]
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert values_of(folder, *SIZES) == [2, 1, 2, 2]
    assert values_of(folder, "max_steps", "eval_steps", "save_steps", "seed") == [1, 0, 0, 7]
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "README.md",
        "config.yaml",
        "recording/recording.json",
        "recording/train/step_000000.safetensors",
        "reproduce.sh",
    }
    assert list(folder.parent.glob(".small.*")) == []


def test_the_contract_is_that_of_the_reduced_configuration(alignment: Alignment) -> None:
    alignment.write()
    folder = extract(alignment)
    manifest = RecordingReader(str(folder / "recording")).manifest
    contract = {field.name: field.value for field in manifest.contract.fields}
    assert contract == dict(zip(contract, values_of(folder, *contract), strict=True))
    assert contract["rollout_batch_size"] == 2
    origin = manifest.provenance["cut_from"]
    assert isinstance(origin, dict)
    assert origin["groups"] == {"0": ["group 2/episode 0"]}


def test_both_sides_are_in_the_configuration(alignment: Alignment) -> None:
    alignment.write()
    config = load_config("config", config_path=extract(alignment))
    assert [(item.name, item.overrides, item.entry) for item in config.align.candidates] == [
        ("change", ["pg_clip=0.1"], None)
    ]
    assert (config.align.baseline, config.exp_name, config.output_dir) == ([], "lake-reproduction", "output")
    assert config.align.tolerance is not None
    assert config.align.tolerance.gradient == 1e-5
    assert (config.rollout_mock.effective_mode, config.rollout_mock.dump_dir) == ("mock", "recording")


def test_groups_are_doubled_until_the_divergence_shows(alignment: Alignment) -> None:
    """After the worst sample's, the groups whose rewards differ come first: 1 and 3, then 0."""
    alignment.write()
    check = FakeCheck(num_needed=2)
    folder = extract(alignment, check)
    assert check.groups == [1, 2]
    batch = load_train_step(RecordingReader(str(folder / "recording")), 0)
    assert [group for _, group, _ in batch.group_sizes] == [1, 2]
    readme = (folder / "README.md").read_text()
    assert (
        "The extraction ran it with 1 of 4 groups. The verdict was identical: all equal\n"
        "The extraction ran it with 2 of 4 groups. The verdict was diverged: change still differs\n"
    ) in readme
    assert "1 of 4 groups: identical\n2 of 4 groups: diverged\n" in check.output.getvalue()


def test_a_divergence_that_shows_with_no_groups_leaves_nothing(alignment: Alignment) -> None:
    alignment.write()
    check = FakeCheck(num_needed=99)
    with pytest.raises(AlignmentError) as caught:
        extract(alignment, check)
    assert check.groups == [1, 2, 4]
    assert str(caught.value).startswith(
        "the divergence does not show again: with all 4 groups of step 0 the reproduction is identical (all equal)."
    )
    assert sorted(path.name for path in alignment.folder.iterdir()) == ["align", "lake.yaml"]


def test_without_a_sample_all_groups_are_kept_and_no_size_changes(alignment: Alignment) -> None:
    alignment.write(sample=None)
    check = FakeCheck()
    folder = extract(alignment, check)
    assert check.groups == [4]
    assert values_of(folder, *SIZES) == [8, 4, 4, 2]


def test_as_many_groups_as_are_asked_for(alignment: Alignment) -> None:
    """Three groups are six trajectories, which updates of four do not divide: one update of six."""
    alignment.write()
    folder = extract(alignment, num_groups=3)
    assert values_of(folder, *SIZES) == [6, 3, 6, 2]


def test_a_layout_that_needs_more_micro_batches_gets_smaller_ones(alignment: Alignment) -> None:
    """Two data-parallel ranks: the two trajectories of one group are two micro-batches of one."""
    alignment.write(overrides=["parallel.data_parallel_size=2"])
    assert values_of(extract(alignment), *SIZES) == [2, 1, 2, 1]


def test_where_one_group_is_too_few_for_the_layout_there_are_more(alignment: Alignment) -> None:
    """Four data-parallel ranks cannot share the two trajectories of one group."""
    alignment.text = CONFIG.replace("micro_batch_size: 2", "micro_batch_size: 1")
    alignment.write(overrides=["parallel.data_parallel_size=4"])
    check = FakeCheck()
    assert values_of(extract(alignment, check), *SIZES) == [4, 2, 4, 1]
    assert check.groups == [2]


def test_what_the_candidate_sets_itself_stays(alignment: Alignment) -> None:
    alignment.write(overrides=["training.micro_batch_size=1"])
    folder = extract(alignment)
    config = load_config("config", config_path=folder, overrides=["training.micro_batch_size=1"])
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (1, 2)
    assert override_keys(load_config("config", config_path=folder).align.candidates[0].overrides) == [
        "training.micro_batch_size"
    ]


def test_a_rate_that_decays_over_the_run_decays_as_it_did(alignment: Alignment) -> None:
    """Three steps of two updates in the baseline; the candidate goes over its batches twice."""
    alignment.text = CONFIG.replace("training: {", "training: {lr_decay_style: linear, ")
    alignment.write(overrides=["ppo_epochs=2"])
    folder = extract(alignment)
    assert values_of(folder, "training.lr_decay_iters") == [6]
    candidate = load_config("config", config_path=folder).align.candidates[0]
    assert candidate.overrides == ["ppo_epochs=2", "training.lr_decay_iters=12"]


def test_a_later_step_begins_from_the_baselines_checkpoint(alignment: Alignment) -> None:
    alignment.write(step=2)
    write_checkpoint(alignment, 2)
    folder = extract(alignment)
    assert RecordingReader(str(folder / "recording")).steps() == {"train": [2]}
    assert values_of(folder, "resume_from_checkpoint", "max_steps") == ["checkpoint/step_000002", 3]
    copied = folder / "checkpoint" / "step_000002"
    assert (copied / "policy" / "weights").read_bytes() == b"weights"
    state = json.loads((copied / "run_state.json").read_text())
    assert state["fixed"] == {"seed": 7, "rollout_batch_size": 2, "train_env_manager.num_env_groups": 1}
    assert state["files"] == {"w": 7}
    assert (
        "- weights: the baseline's checkpoint of step 2, from which both sides begin (`checkpoint`)"
        in (folder / "README.md").read_text()
    )


def test_without_a_checkpoint_the_steps_before_are_kept_and_said(alignment: Alignment) -> None:
    alignment.write(step=2)
    folder = extract(alignment)
    reader = RecordingReader(str(folder / "recording"))
    assert reader.steps() == {"train": [0, 1, 2]}
    assert [load_train_step(reader, step).tokens.tolist()[:2] for step in range(3)] == [[0, 2], [1, 2], [2, 2]]
    assert values_of(folder, "resume_from_checkpoint", "max_steps") == [None, 3]
    assert (
        "- weights: seed 7, from which the initial weights follow; the 2 steps before step 2 are kept, with as many "
        "groups, since the baseline left none at step 2\n"
    ) in (folder / "README.md").read_text()


def test_a_candidate_of_other_weights_does_not_begin_from_the_baselines(alignment: Alignment) -> None:
    alignment.write(step=1, overrides=["precision=float64"])
    write_checkpoint(alignment, 1)
    folder = extract(alignment)
    assert RecordingReader(str(folder / "recording")).steps() == {"train": [0, 1]}
    assert "the baseline has none that the candidate could begin from at step 1" in (folder / "README.md").read_text()


def test_another_step_can_be_asked_for_and_then_no_sample_is_known(alignment: Alignment) -> None:
    alignment.write()
    check = FakeCheck()
    extract(alignment, check, step=1)
    assert check.groups == [4]


def test_unchecked_it_says_so(alignment: Alignment) -> None:
    alignment.write()
    check = FakeCheck()
    folder = extract(alignment, check, is_checked=False)
    assert check.groups == []
    assert "The extraction did not run it (`--no-check`)" in (folder / "README.md").read_text()


def test_the_readme_says_what_it_shows_and_with_what(alignment: Alignment) -> None:
    alignment.write()
    text = (extract(alignment) / "README.md").read_text()
    assert text.startswith(
        f"# change diverges from its baseline\n\nIn the alignment that this was cut from:\n\n> {SENTENCE}"
    )
    assert "Expected: `change` is **diverged**, exit code 1." in text
    assert "## What differs\n\n- `pg_clip=0.1`\n" in text
    assert "- `recording`: step 0, 1 of 4 groups, whole (group 2/episode 0)\n" in text
    assert "- weights: seed 7, from which the initial weights follow\n" in text
    assert (
        "What is not as it was: `rollout_batch_size=2`, `train_env_manager.num_env_groups=1`, "
        "`training.global_batch_size=2`, `max_steps=1`, `eval_steps=0`\n"
    ) in text
    assert "| package | when recorded | when extracted |" in text
    assert "\n| torch | " in text


def test_the_size_is_reported(alignment: Alignment) -> None:
    alignment.write()
    check = FakeCheck()
    facts = alignment.folder / "facts.json"
    folder = extract(alignment, check, json_path=facts)
    assert check.output.getvalue().endswith(f"KiB. Show it with: bash {folder}/reproduce.sh\n")
    told = json.loads(facts.read_text(encoding="utf-8"))
    assert (told["folder"], told["command"]) == (str(folder), f"bash {folder}/reproduce.sh")
    assert told["size_bytes"] > 1000


def test_the_users_code_goes_with_it_and_what_that_imports(
    alignment: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry imports a sibling, relatively and in a function; that imports a module beside its package."""
    package = tmp_path / "code" / "mine"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("import numpy\n")
    (package / "deep" / "run.py").write_text("import json\n\ndef f():\n    from ..kernel import go\n    return go\n")
    (package / "kernel.py").write_text("from helpers import tables\nimport torch\nfrom pipelines import agentic\n")
    (tmp_path / "code" / "helpers").mkdir()
    (tmp_path / "code" / "helpers" / "tables.py").write_text("x = 1\n")
    (tmp_path / "code" / "unused.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    alignment.text = CONFIG.replace("{name: change,", "{name: change, entry: mine.deep.run,")
    alignment.write()
    folder = extract(alignment, run_stored_code=True)
    copied = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert copied == {"helpers/tables.py", "mine/__init__.py", "mine/deep/run.py", "mine/kernel.py"}
    text = (folder / "README.md").read_text()
    assert "- it runs as `python -m mine.deep.run`, whose files are copied here\n" in text
    assert (
        "- `helpers/tables.py`, `mine/__init__.py`, `mine/deep/run.py`, `mine/kernel.py`: the code of the entries"
        in text
    )


def test_the_baselines_code_goes_with_it_too(
    alignment: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    for name in ("ours", "theirs"):
        (tmp_path / "code" / f"{name}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    alignment.text = CONFIG.replace("align:\n", "align:\n  entry: ours\n", 1)
    alignment.write()
    folder = extract(alignment, run_stored_code=True)
    assert load_config("config", config_path=folder).align.entry == "ours"
    assert {path.name for path in folder.rglob("*.py")} == {"ours.py"}
    assert "- both run as `python -m ours`, whose files are copied here\n" in (folder / "README.md").read_text()
    for made in (folder, alignment.root):
        shutil.rmtree(made)
    alignment.text = alignment.text.replace("{name: change,", "{name: change, entry: theirs,")
    alignment.write()
    folder = extract(alignment, run_stored_code=True)
    text = (folder / "README.md").read_text()
    assert {path.name for path in folder.rglob("*.py")} == {"ours.py", "theirs.py"}
    assert "- the baseline runs as `python -m ours`" in text
    assert "- it runs as `python -m theirs`" in text


def test_installed_code_is_left_and_said() -> None:
    files = find_entry_files("pytest", OWN)
    assert (files.paths, files.left) == ((), "pytest is of an installed package")
    assert find_entry_files("pipelines.agentic", OWN).left == "pipelines.agentic is part of this project"
    with pytest.raises(ConfigError, match=r"'no\.such\.module' is not a Python module in the working directory"):
        find_entry_files("no.such.module", OWN)


def test_groups_with_different_rewards_come_first() -> None:
    batch = batch_of((1.0, 1.0), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
    assert [group for _, group, _ in order_groups(batch, None)] == [1, 3, 0, 2]
    assert [group for _, group, _ in order_groups(batch, SAMPLE)] == [2, 1, 3, 0]


def test_what_cannot_be_extracted_is_refused(alignment: Alignment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_extract(tmp_path / "nowhere", "change", output=tmp_path / "small")
    assert str(caught.value) == f"{tmp_path / 'nowhere'} is not the folder of an alignment: it has no align.json"
    alignment.write()
    refusals: Mapping[str, str] = {
        "other": f"{alignment.root} has no candidate 'other'; its candidates are same (identical), change (diverged)",
        "same": f"candidate 'same' of {alignment.root} is identical, not diverged, so it has no divergence to "
        "reproduce; the diverged candidates are change",
    }
    for name, message in refusals.items():
        with pytest.raises(ConfigError) as caught:
            run_extract(alignment.root, name, output=tmp_path / "small")
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match="--groups is 5, expected 1 to 4: the groups of step 0"):
        extract(alignment, num_groups=5)
    with pytest.raises(StepNotFoundError) as absent:
        extract(alignment, step=9)
    assert str(absent.value) == (
        f"the recording {alignment.root / 'recording'} has no training step 9; steps present: train 0-2"
    )
    assert not (tmp_path / "small").exists()


def test_a_recording_that_is_gone_is_an_error(alignment: Alignment) -> None:
    root = alignment.write()
    (root / "recording" / "recording.json").unlink()
    with pytest.raises(RecordingError) as caught:
        extract(alignment)
    assert str(caught.value) == (
        f"the recording of this alignment is gone: there is none at {root / 'recording'}; extract needs its "
        "rollouts, so run the alignment again"
    )


def test_an_output_that_holds_anything_is_not_touched(alignment: Alignment) -> None:
    alignment.write()
    taken = alignment.folder / "small" / "thesis.txt"
    taken.parent.mkdir()
    taken.write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not empty; choose another --output"):
        extract(alignment)
    assert taken.read_text() == "years of work"


def write_python(folder: Path, text: str) -> Path:
    """Stands for the interpreter: a shell script."""
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_script_aligns_in_its_own_folder_with_the_checkout_on_the_path(
    alignment: Alignment, tmp_path: Path
) -> None:
    alignment.write()
    folder = extract(alignment)
    (tmp_path / "checkout").mkdir()
    write_python(tmp_path / "checkout", '[[ "$2" == -c ]] || { echo "$PWD|$PYTHONPATH|$*"; exit 1; }')
    done = subprocess.run(
        ["bash", str(folder / "reproduce.sh"), "--json", "x"],
        cwd=tmp_path / "checkout",
        env={"PATH": "/usr/bin:/bin", "PYTHON": "./python"},
        capture_output=True,
        text=True,
        check=False,
    )
    command = (
        "-P -m mock_scheduler.cli align config --config-path . --recording recording --output-dir output --overwrite "
        "--json x\n"
    )
    assert done.returncode == 1
    assert done.stdout == f"{folder}|{tmp_path / 'checkout'}|{command}"
    assert done.stderr == f"runs in {folder}: PYTHONPATH={tmp_path / 'checkout'} {tmp_path}/checkout/./python {command}"


def test_an_interpreter_without_the_project_gives_no_verdicts_exit_code(alignment: Alignment, tmp_path: Path) -> None:
    """Python ends with 1 where a module is missing, which is the code of ``diverged``."""
    alignment.write()
    folder = extract(alignment)
    python = write_python(tmp_path, "exit 1")
    done = subprocess.run(
        ["bash", str(folder / "reproduce.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith(
        f"error: {python} could not run it; start this from the root of a checkout"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "MOCK_SCHEDULER_ROOT",
            "/nonexist",
            "error: there is no folder /nonexist; set MOCK_SCHEDULER_ROOT to the root of a checkout\n",
        ),
        (
            "PYTHON",
            "/nonexist/python",
            "error: there is no program /nonexist/python; set PYTHON to the interpreter\n",
        ),
    ],
)
def test_a_script_that_cannot_start_says_which_variable_is_wrong(
    alignment: Alignment, variable: str, value: str, message: str
) -> None:
    """The shell would end with 1 there, which is the code of ``diverged``."""
    alignment.write()
    folder = extract(alignment)
    done = subprocess.run(
        ["bash", str(folder / "reproduce.sh")],
        env={"PATH": "/usr/bin:/bin", variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "", message)


def test_the_check_reads_the_verdict_that_the_script_leaves(
    alignment: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment.write()
    folder = extract(alignment)
    result = json.dumps({"candidates": [{"name": "change", "verdict": "suspect", "reason": "who knows"}]})
    # The last --output-dir counts; it is followed by the overrides of a check.
    last = 'while [ "$1" ]; do if [ "$1" = --output-dir ]; then dir="$2"; fi; shift; done'
    leaves = write_python(tmp_path, f'{last}\nmkdir -p "$dir"; echo \'{result}\' > "$dir/align.json"; exit 2')
    monkeypatch.setattr(sys, "executable", str(leaves))
    assert run_reproduction(folder, "change") == Outcome(verdict="suspect", text="who knows")
    assert not (folder / "output").exists()
    monkeypatch.setattr(sys, "executable", str(write_python(tmp_path, "echo it went wrong; exit 5")))
    with pytest.raises(AlignmentError) as caught:
        run_reproduction(folder, "change")
    first, shown, last_line = str(caught.value).split("\n")
    assert first == (
        "the reproduction's script ended with exit code 5 and no result; --no-check makes the folder without "
        "running it. The last lines of its output:"
    )
    assert shown.startswith(f"runs in {folder}: PYTHONPATH=")
    assert last_line == "it went wrong"


def test_the_command_ends_as_its_errors_say(alignment: Alignment, capsys: pytest.CaptureFixture[str]) -> None:
    alignment.write()
    output = alignment.folder / "small"
    assert main(["extract", str(alignment.root), "same", "--output", str(output)]) == 5
    assert "is identical, not diverged" in capsys.readouterr().err
    assert main(["extract", str(alignment.root), "change", "--output", str(output), "--no-check", "--groups", "2"]) == 0
    assert values_of(output, "rollout_batch_size") == [4]
