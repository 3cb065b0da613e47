"""Small recordings, runs and alignments that the fuzzers change, and commands that read them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_scheduler import cli
from mock_scheduler.alignment.runs.cache import Fingerprint, save_fingerprint
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.files import save_noise
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.support.digests import JSON, seal
from tests.commands.test_compare import Runs
from tests.recording.builders import make_contract, make_info
from tests.recording.step_bytes import make_rich_batch, rewrite
from tests.recording.step_recordings import RUN_ID

FAKE = "whole, every digest matches"
#: Escape sequences, C1, bidi controls, invisible signs, line breaks that fake a line, markup, emoji.
EVIL = f"\x1b]0;t\x07\x1b[2J\x9b31m\u202e\u2066\u200b\r\t\n{FAKE}\u2028{FAKE}\x85{FAKE}[bold]:smile:[/bold]"
KEYS: dict[str, Any] = {"config.seed": 7, "entry": "pipelines.agentic", "recording": "r"}
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def build(root: Path) -> Path:
    """Make ``rec`` and ``other`` (recordings), ``base``, ``tp2`` and ``noisy`` (runs), noise and an alignment."""
    root.mkdir(parents=True, exist_ok=True)
    for name, seed in (("rec", 1), ("other", 2)):
        _record(root / name, seed)
    runs = Runs(root)
    runs.make("base")
    runs.make("tp2", "parallel.tensor_model_parallel_size=2", gradient=1.5)
    noisy = [runs.make(f"noisy{seed}", f"seed={seed}", gradient=1.0 + 1e-6 * seed) for seed in (1, 2, 3)]
    save_noise(measure_noise(root / "base", noisy, seeds=(1, 2, 3)), root / "noise.json")
    save_fingerprint(root / "base", Fingerprint(keys=KEYS), elapsed_s=1.0)
    _align(root / "align", root)
    return root


def _record(folder: Path, num_groups: int) -> None:
    provenance: dict[str, JSON] = {
        "vocabulary": {str(index): f"t{index}" for index in range(30)},
        "facts": ["one"],
    }
    writer = open_recording(
        str(folder),
        contract=make_contract(envs=["a", "b"], nested={"x": [1, 2]}),
        plan=(),
        provenance=provenance,
        resume=False,
        options=WriterOptions(background=False),
        run_id=RUN_ID,
    )
    info = make_info(0, run_id=RUN_ID, scheduler_state={"next": {"a": [1, "x"]}}, data_cursor={"at": "here"})
    writer.write_step(make_rich_batch(num_groups), info)
    writer.close()


def _align(folder: Path, root: Path) -> None:
    for name, source in (("baseline", "base"), ("tp2", "tp2")):
        (folder / name).mkdir(parents=True)
        shutil.copy(root / source / "config.yaml", folder / name)
    shutil.copytree(root / "rec", folder / "recording")
    divergence = {"step": 0, "difference": {"figures": {"worst": {"sample": "default/group 0/episode 0/env 0/turn 0"}}}}
    candidate = {
        "name": "tp2",
        "verdict": "diverged",
        "sentence": "step 0 differs",
        "overrides": ["pg_clip=0.1"],
        "first_divergence": divergence,
    }
    (folder / "align.json").write_text(json.dumps({"candidates": [candidate], "recording_dir": str(root / "rec")}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """The end of one command."""

    code: int
    out: str
    err: str

    def check(self) -> None:
        """Fail on a traceback, on a character that a terminal obeys or hides, and on a faked line."""
        text = self.out + self.err
        assert self.code in (0, 1, 2, 3, 4, 5), text[-3000:]
        assert not _CONTROL.findall(text), text
        assert not [line for line in text.split("\n") if line.strip(" -").startswith(FAKE)], text


def command(*arguments: object) -> Printed:
    """Run one command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(map(str, arguments)))
    return Printed(code=code, out=out.getvalue(), err=err.getvalue())


def commands_of(root: Path, name: str) -> list[tuple[object, ...]]:
    """The commands that read a file of the folders."""
    if name.startswith("rec/"):
        rec = root / "rec"
        rows = [("show", rec), ("show", rec, "--row", "zzz"), ("show", rec, "--step", 9)]
        others = [("diff", rec, root / "other"), ("diff", root / "other", rec), ("compare", rec, root / "other")]
        return [("inspect", rec), ("verify", rec), ("correction", rec), ("inspect", rec, "--json", "-"), *rows, *others]
    if name.startswith("align/"):
        out = ("-o", root / "out", "--no-check")
        return [("extract", root / "align", "tp2", *out), ("extract", root / "align", "x", *out)]
    if name.startswith("tp2/metrics"):
        return [
            ("compare", root / "base", root / "tp2"),
            ("compare", root / "tp2/metrics.jsonl", root / "base/metrics.jsonl", "--json", "-"),
            ("plot", root / "base", root / "tp2", "-o", root / "p.html"),
        ]
    return [
        ("compare", root / "base", root / "tp2", "--html", root / "p.html"),
        ("compare", root / "tp2", root / "base", "--no-metrics"),
        ("replicas", root / "tp2"),
        ("correction", root / "rec", "--run", root / "tp2"),
    ]


def change_document(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a file, and seal it again where it was sealed."""
    if path.suffix == ".safetensors":
        path.write_bytes(rewrite(path.read_bytes(), lambda document: document.update(change(copy.deepcopy(document)))))
        return
    if path.suffix == ".jsonl":
        rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    document = json.loads(path.read_text())
    is_sealed = isinstance(document, dict) and document.pop("digest", None) is not None
    changed = change(document)
    text = json.dumps(seal(changed) if is_sealed and isinstance(changed, dict) else changed, indent=2, sort_keys=True)
    path.write_text(text + "\n")


def places_of_texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every text of a document, and every key (its place ends with ``None``)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(key, str):
            yield (*place, key, None)
        if isinstance(item, str):
            yield (*place, key)
        yield from places_of_texts(item, (*place, key))


def poison(value: Any, places: list[tuple[Any, ...]]) -> Any:
    """A document with hostile text added at these places."""
    value = copy.deepcopy(value)
    # The deepest first: a key that is renamed leads to nothing any more.
    for place in sorted(places, key=len, reverse=True):
        *above, last = place if place[-1] is not None else place[:-1]
        holder = value
        for step in above:
            holder = holder[step]
        if place[-1] is None:
            holder[f"{last}{EVIL}"] = holder.pop(last)
        else:
            holder[last] = f"{holder[last]}{EVIL}"
    return value
