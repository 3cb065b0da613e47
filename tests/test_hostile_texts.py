"""Foreign folders whose every text is hostile: no command lets one act on the terminal, hide, or fake a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.fuzz.folders import build, change_document, command, commands_of, places_of_texts, poison
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
