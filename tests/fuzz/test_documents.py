"""Fuzzers of run folders, noise, fingerprints, alignments, manifests, overrides and configurations."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from mock_scheduler.alignment.runs.cache import Fingerprint, NotReusable, Reusable, find_cached
from mock_scheduler.support.text import is_hostile, printable, printable_lines, printable_message
from tests.fuzz.folders import EVIL, KEYS, build, change_document, command, commands_of
from tests.fuzz.limited import run_limited, start_clock
from tests.fuzz.mutation import changed, changed_text

pytestmark = [pytest.mark.all, pytest.mark.timeout(3600)]

_DOCUMENTS = (
    *("rec/recording.json", "tp2/run.json", "tp2/ledger.json", "tp2/metrics.jsonl", "noise.json", "align/align.json"),
    *("tp2/config.yaml", "align/baseline/config.yaml", "base/fingerprint.json", "tp2/error.json"),
)
_NUM_EXAMPLES = 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = build(tmp_path_factory.mktemp("folders"))
    (root / "tp2/error.json").write_text(json.dumps({"type": "X", "message": "m", "exit_code": 5}))
    return root


def check(root: Path, name: str) -> None:
    """Run every command that reads the file; each ends in a verdict or a clear error."""
    if name == "base/fingerprint.json":
        assert isinstance(find_cached(root / "base", Fingerprint(keys=KEYS)), Reusable | NotReusable)
        return
    if name == "tp2/error.json":
        (root / "tp2/run.json").unlink()
    for arguments in commands_of(root, name):
        command(*arguments).check()


def fuzz(strategy: st.SearchStrategy[Any], act: Callable[[Any], None], *, num: int = _NUM_EXAMPLES) -> None:
    """Run seeded examples within the limits."""

    @seed(18)
    @settings(max_examples=num, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(example: Any) -> None:
        start_clock()
        act(example)

    run_limited(run)


@pytest.mark.parametrize("name", _DOCUMENTS)
def test_changed_documents_are_a_verdict_or_a_clear_error(name: str, folders: Path) -> None:
    text = (folders / name).read_text()
    is_yaml = name.endswith(".yaml")
    document = yaml.safe_load(text) if is_yaml else json.loads(text.splitlines()[0] if name.endswith("l") else text)
    if isinstance(document, dict):
        document.pop("digest", None)

    def act(example: Any) -> None:
        with tempfile.TemporaryDirectory(dir=folders.parent) as temporary:
            root = Path(shutil.copytree(folders, Path(temporary) / "copy"))
            if isinstance(example, bytes):
                (root / name).write_bytes(example)
            elif is_yaml:
                (root / name).write_text(yaml.safe_dump(example), encoding="utf-8", errors="surrogatepass")
            else:
                change_document(root / name, lambda _: example)
            check(root, name)

    fuzz(changed(document) | changed(document) | changed_text(text), act)


_PIECES = [
    "seed",
    "a.b",
    "=",
    "1",
    "null",
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    "'",
    '"',
    "${",
    "}",
    "+",
    "~",
    "@",
    "\\",
    EVIL,
    "é",
]


def test_overrides_are_read_or_refused() -> None:
    pieces = st.lists(st.sampled_from(_PIECES) | st.text(max_size=5), min_size=1, max_size=30).map("".join)
    fuzz(pieces, lambda text: command("config", "quickstart", "--", text).check(), num=600)


def test_configurations_are_read_or_refused(tmp_path: Path) -> None:
    text = "a: &a [x, x]\nb: {c: *a, d: '${a}'}\nexp_name: x\nseed: 7\n"
    whole = "\n".join(line for line in Path("configs/quickstart.yaml").read_text().splitlines() if line[:1] != "#")

    def act(example: bytes) -> None:
        (tmp_path / "fuzz.yaml").write_bytes(example)
        command("config", "fuzz", "--config-path", tmp_path).check()

    fuzz(changed_text(text) | changed_text(whole), act, num=600)


def test_printable_texts_hold_nothing_that_acts() -> None:
    def act(text: str) -> None:
        assert not any(map(is_hostile, printable(text)))
        assert printable(printable(text)) == printable(text)
        assert not any(map(is_hostile, printable_lines(text).replace("\n", "")))
        assert all(line.startswith(" ") or not line for line in printable_message(text).split("\n")[1:])

    characters = st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Co", "Zl", "Zp"])
    fuzz(st.text(characters, max_size=60), act, num=5000)
