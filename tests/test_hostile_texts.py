"""Foreign folders whose every text is hostile: no command lets one act on the terminal, hide, or fake a line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import mock_scheduler
from tests.fuzz.folders import (
    EVIL,
    FAKE,
    Printed,
    build,
    change_document,
    command,
    commands_of,
    places_of_texts,
    poison,
)
from tests.recording.step_bytes import split_header

_DOCUMENTS = (
    "rec/recording.json",
    "rec/train/step_000000.safetensors",
    "tp2/run.json",
    "tp2/ledger.json",
    "tp2/metrics.jsonl",
    "noise.json",
    "align/align.json",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders, tmp_path / "copy"))


def read(path: Path) -> object:
    if path.suffix == ".safetensors":
        document = json.loads(split_header(path.read_bytes())[0]["__metadata__"]["rollout"])
        return {key: value for key, value in document.items() if key != "digest"}
    document = json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
    return {key: value for key, value in document.items() if key != "digest"}


@pytest.mark.parametrize("name", _DOCUMENTS)
def test_free_texts_of_a_document_do_not_act_on_the_terminal(name: str, copy: Path) -> None:
    """All values at once: what is free is shown, and the first that is not is refused by name."""
    places = [place for place in places_of_texts(read(copy / name)) if place[-1] is not None]
    free = [place for place in places if place[0] not in ("format", "digest", "status", "kind")]
    change_document(copy / name, lambda document: poison(document, free))
    for arguments in commands_of(copy, name):
        command(*arguments).check()


@pytest.mark.all
@pytest.mark.parametrize("name", _DOCUMENTS)
def test_no_text_of_a_document_acts_on_the_terminal(name: str, folders: Path, tmp_path: Path) -> None:
    """Every value and every key, one at a time: most reach another message each."""
    for number, place in enumerate(places_of_texts(read(folders / name))):
        root = Path(shutil.copytree(folders, tmp_path / str(number)))
        change_document(root / name, lambda document, place=place: poison(document, [place]))  # type: ignore[misc]
        for arguments in commands_of(root, name):
            command(*arguments).check()
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "name",
    [
        f"step_1\x1b[2J\x9b1m\u202e\n{FAKE}",
        b"\xff\xfe\x1b".decode("utf-8", "surrogateescape"),
        *(pytest.param(name, marks=pytest.mark.all) for name in ("a\x1b[2J", f"x\r{FAKE}", "\u202egnp.pt")),
    ],
)
def test_a_name_of_a_file_does_not_act_on_the_terminal(name: str, copy: Path) -> None:
    """A damaged recording could say on its terminal that it is whole."""
    step = copy / "rec/train/step_000000.safetensors"
    content = bytearray(step.read_bytes())
    content[-1] ^= 1
    step.write_bytes(content)
    (copy / "rec/train" / name).write_text("x")
    for folder in ("base/trace", "tp2/trace/step_000001", "tp2"):
        (copy / folder / name).write_text("x")
    for arguments in (*commands_of(copy, "rec/"), *commands_of(copy, "tp2/run.json")):
        command(*arguments).check()
    printed = command("verify", copy / "rec")
    printed.check()
    assert printed.code == 5
    assert "does not match" in printed.out


@pytest.mark.parametrize(
    "name",
    [f"a\n{FAKE}", *(pytest.param(name, marks=pytest.mark.all) for name in ("\x1b[2J\x9b", "\u202eb", "[b]:x:"))],
)
def test_a_name_of_a_folder_does_not_act_on_the_terminal(name: str, copy: Path) -> None:
    root = copy.rename(copy.with_name(name))
    for document in ("rec/", "tp2/run.json", "tp2/metrics.jsonl", "align/align.json"):
        for arguments in commands_of(root, document):
            command(*arguments).check()
    for missing in ("rec", "align"):
        shutil.rmtree(root / missing)
    for arguments in (*commands_of(root, "rec/"), *commands_of(root, "align/align.json")):
        printed = command(*arguments)
        printed.check()


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("config",), ("show", "--mode"), (), ("compare", "a"), ("doctor", "--step")]
)
def test_what_a_script_passes_on_does_not_act_on_the_terminal(arguments: tuple[str, ...]) -> None:
    printed = command(*arguments, EVIL)
    printed.check()
    assert printed.code == 5


def test_on_a_terminal_only_our_own_styles_act(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    change_document(copy / "rec/recording.json", lambda document: {**document, "run_id": EVIL})
    printed = command("inspect", copy / "rec")
    own = re.compile(r"\x1b\[[0-9;]*m")
    assert own.search(printed.out)
    Printed(code=printed.code, out=own.sub("", printed.out), err=own.sub("", printed.err)).check()


def test_a_verdict_that_python_prints_acts_on_no_terminal(copy: Path) -> None:
    """``print(verdict)`` and a test that fails write to a terminal too."""
    step = "rec/train/step_000000.safetensors"
    change_document(copy / step, lambda document: poison(document, [("content", "scheduler_ids", 0)]))
    verdict = mock_scheduler.compare(copy / "rec", copy / "other")
    for text in (str(verdict), repr(verdict), verdict.describe(), str(verdict.first)):
        Printed(code=1, out=text, err="").check()
    assert "\\x1b" in str(verdict)


def test_a_key_of_a_configuration_begins_no_line(copy: Path) -> None:
    path = copy / "align/baseline/config.yaml"
    path.write_text(f"{path.read_text()}{json.dumps(EVIL)}: 1\n")
    printed = command("extract", copy / "align", "tp2", "-o", copy / "out", "--no-check")
    printed.check()
    assert "unknown key" in printed.err


def test_letters_of_every_language_are_shown_as_they_are(copy: Path) -> None:
    change_document(copy / "rec/recording.json", lambda document: {**document, "run_id": "Läufer 漢字 العربية हिन्दी"})
    assert "Läufer 漢字 العربية हिन्दी" in command("inspect", copy / "rec").out
