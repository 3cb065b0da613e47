"""Documents of runs, noise and alignments that are damaged: each is one clear error with the file's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.alignment.runs.cache import Fingerprint, NotReusable, Reusable, find_cached
from mock_scheduler.support.digests import seal
from tests.fuzz.folders import KEYS, build, change_document, command, commands_of

_HUGE = "1" + "0" * 400
_DEEP = "[" * 100_000
_RUN = '{"status": "completed", "layout": "x", "wall_s": 1.5, "rollout_s": 1, "batches": {}}'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b"\xff\n", "metrics are not UTF-8"),
        ("metrics.jsonl", f'{{"step": 0, "metrics": {{"a": {_HUGE}}}}}', "metrics.jsonl:1: metric a is 10000"),
        ("metrics.jsonl", '{"step": 0, "metrics": {"a": []}}', "metric a is [], expected a number"),
        ("metrics.jsonl", '{"step": true, "metrics": {}}', "expected {"),
        ("metrics.jsonl", f"{_DEEP}\n", "metrics.jsonl:1: not JSON"),
        ("metrics.jsonl", f'{{"step": {"9" * 5000}}}\n', "metrics.jsonl:1: not JSON"),
        ("run.json", _RUN.replace("1.5", _HUGE), "wall_s is 1000"),
        ("run.json", _RUN.replace("{}", '{"' + "9" * 5000 + '": "x"}'), "batches is {'9999"),
        ("run.json", _DEEP, "run.json is not JSON"),
        ("config.yaml", "a0: &a [*a]\n", "config.yaml line 1: the alias *a stands within its own anchor"),
        ("config.yaml", "[" * 100_000, "config.yaml"),
        ("config.yaml", b"\xff", "config.yaml cannot be read: 'utf-8' codec"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_run_is_one_clear_error(name: str, content: str | bytes, said: str, copy: Path) -> None:
    (copy / "tp2" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    printed = command("compare", copy / "base", copy / "tp2")
    printed.check()
    assert printed.code in (3, 5)
    # Without white space: a long path is broken where a line ends.
    text = "".join((printed.out + printed.err).split())
    assert "".join(said.split()) in text
    assert str(copy / "tp2" / name) in text


@pytest.mark.parametrize(("rows", "key"), [("tensors", "slopes"), ("tensors", "relative"), ("metrics", "changes")])
def test_noise_whose_square_no_float_holds_gives_a_verdict(rows: str, key: str, copy: Path) -> None:
    """A slope of 1e300 in measured noise ended the comparison in an OverflowError."""

    def apply(noise: dict[str, Any]) -> dict[str, Any]:
        for row in noise[rows]:
            row[key] = [1e300 for _ in row[key]]
        return noise

    change_document(copy / "noise.json", apply)
    printed = command("compare", copy / "base", copy / "tp2")
    printed.check()
    assert printed.code == (3 if key == "relative" else 1)  # within such noise nothing is judged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda noise: noise["tensors"][0]["relative"].append(0.1), "has 4 values, expected 1 to 3, one for each run"),
        (lambda noise: noise["metrics"][0].update(changes=[]), "has 0 values, expected 1 to 3"),
        (lambda noise: noise["tensors"][0].update(slopes=[1.0]), "values, expected"),
        (lambda noise: noise["metrics"][0].update(changes=["x"]), "metrics[0].changes[0] is 'x'"),
        (lambda noise: noise["tensors"][0].update(kind="x"), "tensors[0].kind is 'x'"),
        (lambda noise: noise.update(seeds={}), "seeds is {}"),
        (lambda noise: noise.update(unit=10**400), "unit is 1000"),
        (lambda noise: noise.pop("tensors"), "tensors is missing"),
        (lambda noise: noise.update(trace_dirs=[1]), "trace_dirs[0] is 1"),
    ],
)  # fmt: skip
def test_damaged_noise_is_one_clear_error(change: Any, said: str, copy: Path) -> None:
    def apply(noise: dict[str, Any]) -> dict[str, Any]:
        change(noise)
        return noise

    change_document(copy / "noise.json", apply)
    printed = command("compare", copy / "base", copy / "tp2")
    printed.check()
    assert printed.code == 3
    assert f"{copy / 'noise.json'} is no measured noise of a baseline: " in printed.err
    assert said in printed.err


@pytest.mark.parametrize(
    "change",
    [
        {"keys": []},
        {"keys": None},
        {"files": {"run.json": [10**400]}},
        {"files": [1]},
        {"elapsed_s": "x"},
        {"elapsed_s": 10**400},
        {"elapsed_s": -1},
        {"elapsed_s": [[]]},
        {"format_version": {}},
        {"keys": {"code.sources": 10**4000}},
    ],
)
def test_a_damaged_fingerprint_has_the_run_made_anew(change: dict[str, Any], copy: Path) -> None:
    wanted = Fingerprint(keys=KEYS)
    assert isinstance(find_cached(copy / "base", wanted), Reusable)
    change_document(copy / "base/fingerprint.json", lambda document: {**document, **change})
    found = find_cached(copy / "base", wanted)
    assert isinstance(found, NotReusable)
    assert found.was_there
    assert len(found.reason) < 600


@pytest.mark.parametrize("missing", ["keys", "files", "elapsed_s", "format_version"])
def test_a_fingerprint_without_a_key_has_the_run_made_anew(missing: str, copy: Path) -> None:
    def drop(document: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in document.items() if key != missing}

    change_document(copy / "base/fingerprint.json", drop)
    assert isinstance(find_cached(copy / "base", Fingerprint(keys=KEYS)), NotReusable)


@pytest.mark.parametrize("text", ["", "[", "[1]", "\x00", "NaN", '{"digest": []}', _DEEP, json.dumps(seal({}))])
def test_a_fingerprint_that_is_none_has_the_run_made_anew(text: str, copy: Path) -> None:
    (copy / "base/fingerprint.json").write_text(text)
    assert isinstance(find_cached(copy / "base", Fingerprint(keys=KEYS)), NotReusable)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({}, "candidates is missing"),
        ({"candidates": {}}, "candidates is {}"),
        ({"candidates": [1]}, "candidates[0] is 1"),
        ({"candidates": [{"name": []}]}, "candidates[0].name is []"),
        ({"candidates": [{"name": "tp2", "verdict": {}}]}, "candidates[0].verdict is {}"),
        ({"candidates": [{"name": "tp2", "overrides": [1]}]}, "candidates[0].overrides[0] is 1"),
        ({"candidates": [{"name": "tp2", "first_divergence": []}]}, "candidates[0].first_divergence is []"),
        ({"candidates": [{"name": "tp2", "first_divergence": {"step": "x"}}]}, "first_divergence.step is 'x'"),
    ],
)
def test_a_damaged_result_of_an_alignment_is_one_clear_error(result: object, said: str, copy: Path) -> None:
    (copy / "align/align.json").write_text(json.dumps(result))
    printed = command(*commands_of(copy, "align/align.json")[0])
    printed.check()
    assert printed.code == 5
    assert f"{copy / 'align/align.json'} is not a result of mock-scheduler align: " in printed.err
    assert said in printed.err


@pytest.mark.parametrize("url", ["ftp://x/y", "github://x/y", "webhdfs://x/y", "reference://x", "zip://x", "data://x"])
def test_a_url_that_is_no_place_is_one_clear_error(url: str) -> None:
    printed = command("inspect", url)
    printed.check()
    assert printed.code == 5
    assert printed.err.startswith(f"error: {url}")
