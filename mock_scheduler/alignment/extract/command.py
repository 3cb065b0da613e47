"""Makes the reproduction of a diverged candidate of a command: its code, command, settings, and its first steps.

A command reads its own data, so no row is left out: the run ends with the step of the divergence instead. Its code and
small files are copied, and data of its own are named with the digests of their rows, by which the check knows them.

Contract: everything in the folder is named relative to it; nothing of an alignment that somebody else made is copied or
run unasked.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mock_scheduler.alignment.extract.extraction import CheckReproduction
from mock_scheduler.alignment.extract.folder import (
    OUTPUT_FOLDER,
    README_FILE,
    RECORDING_FOLDER,
    SCRIPT_FILE,
    needed_flag,
    write_script,
)
from mock_scheduler.alignment.extract.source import (
    find_candidate,
    find_change,
    open_recording,
    read_result,
    recording_elsewhere,
)
from mock_scheduler.command_program.loading import build_loader
from mock_scheduler.command_program.program import own_config, steps_until
from mock_scheduler.config.align import CandidateConfig, MatrixConfig
from mock_scheduler.config.loading import dump_config
from mock_scheduler.config.stored_code import StoredCode, Use, refuse_stored_code
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import RunConfig, list_stored_code
from mock_scheduler.run_folder.finished_run import load_batches
from mock_scheduler.support.files import load_json_object
from mock_scheduler.support.foreign_files import copy_folder, refuse_link_out
from mock_scheduler.support.local_key import is_own
from mock_scheduler.support.run_files import ALIGN_FILE, BASELINE_NAME, COMMAND_FILE, RUN_FILE
from mock_scheduler.support.text import bullet_list, count_of, format_bytes, in_code, in_prose, join_words, printable

CODE_FOLDER = "code"
#: Files of a command above this size are data: they are named, and not copied.
MAX_COPIED_BYTES = 1 << 20
_MADE_HERE = ".mock-scheduler-*"
_README = f"""\
# {{name}} diverges from its baseline

In the alignment that this is from:

> {{sentence}}

{{remark}}

## Run it

From the root of a checkout of mock-scheduler, or with `MOCK_SCHEDULER_ROOT=…`; `PYTHON=…` is another interpreter:

```bash
bash {{script}}
```

It starts this command in {{working_dir}}, with the arguments that `{COMMAND_FILE}` has for each layout:

```
{{command}}
```

Expected: `{{name}}` is **diverged**, exit code 1.

## What differs

{{changes}}

## What is here

- `{COMMAND_FILE}`: the command, its settings and variables, and the candidate; a run ends after step {{step}}
- `{CODE_FOLDER}`: {{num_files}} of `sources`{{left}}

## Its data

The command reads them itself. These are the digests of the rows of each step (`batches` in `run.json`); where yours are
others, so are the data:

| step | rows |
| --- | --- |
{{rows}}

## Versions

{{versions}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergedCommand:
    """Holds a diverged candidate of an alignment of a command.

    change: the candidate as it was configured. sentence: its first divergence. step: to reproduce. batches: digests of
    the rows that the baseline trained on, by step. used: the allowed code, in words. is_trusted: it may run.
    """

    align_dir: Path
    change: CandidateConfig
    baseline: RunConfig
    sentence: str
    step: int
    batches: Mapping[int, str]
    recording: Path | None
    used: str
    is_trusted: bool


def is_of_command(align_dir: Path) -> bool:
    """Says whether the runs of an alignment are a command's."""
    return (align_dir / BASELINE_NAME / COMMAND_FILE).is_file()


def read_diverged_command(
    align_dir: Path, name: str, *, step: int | None, use: Use, run_stored_code: bool
) -> DivergedCommand:
    """Reads a diverged candidate; ``step``: another last one than its divergence's.

    Raises:
        ConfigError: as ``source.read_diverged``.
    """
    result = read_result(align_dir)
    found = find_candidate(result, name, align_dir)
    stored = align_dir / BASELINE_NAME / COMMAND_FILE
    refuse_link_out(stored, align_dir)
    is_mine = is_own(align_dir / ALIGN_FILE) and is_own(stored)
    named = [] if is_mine else list_stored_code(stored, overrides=found.overrides or (), only=name)
    refuse_stored_code(stored, named, use=use, is_allowed=run_stored_code)
    baseline = build_loader(stored.stem, stored.parent)(())
    sources = ", ".join(own_config(baseline).sources)
    copied = [StoredCode(kind="files to copy", key="sources", value=sources, use=Use.LOAD)]
    copied += [] if baseline.rollout_mock is None else recording_elsewhere(result, align_dir)
    used = refuse_stored_code(stored, [] if is_mine else [*named, *copied], use=use, is_allowed=run_stored_code)
    batches = load_batches(align_dir / BASELINE_NAME)
    place = found.first_divergence.step if found.first_divergence is not None else None
    wanted = place if step is None else step
    wanted = max(batches, default=0) if wanted is None else wanted
    if wanted not in batches:
        raise ConfigError(f"--step is {wanted}; the baseline has steps {', '.join(map(str, sorted(batches)))}")
    return DivergedCommand(
        align_dir=align_dir,
        change=find_change(baseline, name, found),
        baseline=baseline,
        sentence=found.sentence or found.reason or "",
        step=wanted,
        batches={number: digest for number, digest in batches.items() if number <= wanted},
        recording=None if baseline.rollout_mock is None else Path(open_recording(result, align_dir).dump_dir),
        used=used,
        is_trusted=is_mine or run_stored_code,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandExtraction:
    """An extraction; ``check`` ``None``: the reproduction is not run."""

    source: DivergedCommand
    check: CheckReproduction | None
    console: Console

    def make(self, folder: Path) -> None:
        """Writes the folder, and runs it where it is to be checked.

        Raises:
            AlignmentError: the divergence does not show again.
        """
        folder.mkdir()
        code = _Code.of(own_config(self.source.baseline).sources, but=self.source.align_dir)
        config = self._write(folder, code)
        remark = "The extraction did not run it (`--no-check`), so it may not diverge."
        if self.check is not None:
            remark = self._run(folder, code)
        (folder / README_FILE).write_text(self._describe(config, code, remark, folder), encoding="utf-8")

    def _write(self, folder: Path, code: _Code) -> RunConfig:
        source, own = self.source, own_config(self.source.baseline)
        code.copy_to(folder / CODE_FOLDER)
        working_dir = code.place(Path(own.working_dir or ""))
        (folder / working_dir).mkdir(parents=True, exist_ok=True)
        align = source.baseline.align.model_copy(
            update={"output_dir": None, "baseline": [], "candidates": [source.change], "matrix": MatrixConfig()}
        )
        steps = steps_until(own, source.step)
        values = {
            **({} if steps is None else {"max_steps": steps}),
            "exp_name": f"{own.exp_name.removesuffix(f'-{BASELINE_NAME}')}-reproduction",
            "output_dir": OUTPUT_FOLDER,
            "working_dir": working_dir,
            "sources": [CODE_FOLDER],
            "align": align,
        }
        config = own.model_copy(update=values)
        config.keep_environment_texts(own.environment_texts)
        (folder / COMMAND_FILE).write_text(dump_config(config), encoding="utf-8")
        options = ""
        if source.recording is not None:
            copy_folder(source.recording, folder / RECORDING_FOLDER, root=source.recording)
            options = f" --recording {RECORDING_FOLDER}"
        write_script(folder, config=Path(COMMAND_FILE).stem, options=options, packages=())
        # As it will be loaded: what cannot be is said now, and not by the reproduction.
        build_loader(Path(COMMAND_FILE).stem, folder)(source.change.overrides)
        return config

    def _run(self, folder: Path, code: _Code) -> str:
        assert self.check is not None
        source = self.source
        with self.console.status("running the reproduction"):
            outcome = self.check(folder, source.change.name)
        self.console.print(f"reproduction: {outcome.verdict}", highlight=False)
        others = [step for step, digest in source.batches.items() if outcome.batches.get(step, digest) != digest]
        if not outcome.is_diverged:
            causes = [f"it read other rows than the alignment did, first at step {others[0]}"] if others else []
            causes += [f"files above 1 MiB were not copied: {', '.join(map(str, code.left))}"] if code.left else []
            causes += ["its code, packages or machine are others, or it does not repeat itself (mock-scheduler doctor)"]
            raise AlignmentError(
                f"the divergence does not show again: the reproduction is {outcome.verdict} ({outcome.text}). Likely "
                f"causes:{bullet_list(causes)}"
            )
        rows = f"from step {others[0]} on the rows are others than there" if others else "the rows are those of there"
        return f"The extraction ran it. The verdict was {outcome.verdict}: {outcome.text}. Of its data, {rows}."

    def _describe(self, config: RunConfig, code: _Code, remark: str, folder: Path) -> str:
        source, own = self.source, own_config(config)
        changes = [f"- {in_code(text)}" for text in source.change.overrides]
        left = [f"  - {in_code(str(path))}: {format_bytes(size)}" for path, size in code.left.items()]
        return _README.format(
            name=source.change.name,
            sentence=in_prose(source.sentence),
            remark=in_prose(remark),
            script=f"{SCRIPT_FILE}{needed_flag(folder)}",
            working_dir=in_code(own.working_dir or "."),
            command=printable(join_words(own.command)),
            changes="\n".join(changes or ["- nothing is configured otherwise: the candidate repeats the baseline"]),
            step=source.step,
            num_files=count_of(len(code.files), "file"),
            left="\n".join([", without these, which are larger than 1 MiB:", *left] if left else []),
            rows="\n".join(f"| {step} | {_in_cell(digest[:16])} |" for step, digest in sorted(source.batches.items())),
            versions=_describe_versions(source.align_dir / BASELINE_NAME),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """Holds the files of ``sources`` below their common folder ``root``; ``left``: larger ones, with their sizes."""

    root: Path
    files: tuple[Path, ...]
    left: Mapping[Path, int]

    @classmethod
    def of(cls, sources: Sequence[str], *, but: Path) -> _Code:
        folders = []
        for source in sources:
            if not Path(source).exists():
                raise ConfigError(f"sources: there is no {source} any more; extract copies the command's code from it")
            folders.append(source if Path(source).is_dir() else str(Path(source).parent))
        root = Path(os.path.commonpath(folders))
        files = sorted({path for source in sources for path in _list_files(Path(source), but)})
        large = {path: path.stat().st_size for path in files if path.stat().st_size > MAX_COPIED_BYTES}
        kept = tuple(path for path in files if path not in large)
        return cls(root=root, files=kept, left={path.relative_to(root): size for path, size in large.items()})

    def copy_to(self, folder: Path) -> None:
        for path in self.files:
            target = folder / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    def place(self, path: Path) -> str:
        """Where a folder is in the reproduction; one outside of the sources stays where it is."""
        return str(CODE_FOLDER / path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def _list_files(place: Path, but: Path) -> Iterator[Path]:
    """Lists the regular files of a source, without hidden ones, links, and results of ours."""
    if place.is_file():
        yield place
        return
    is_result = (place / RUN_FILE).is_file() or any(place.glob(_MADE_HERE))
    if is_result or place.resolve() == but.resolve() or place.name == "__pycache__":
        return
    for path in sorted(place.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir() or path.is_file():
            yield from _list_files(path, but)


def _in_cell(text: str) -> str:
    """Gives a span of code that ends no cell of a table either."""
    return in_code(text).replace("|", "\\|")


def _describe_versions(baseline_dir: Path) -> str:
    try:
        stated = load_json_object(baseline_dir / RUN_FILE, inside=baseline_dir).get("packages")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{baseline_dir / RUN_FILE} {error}") from error
    packages = {"python": sys.version.split()[0], **(stated if isinstance(stated, dict) else {})}
    rows = "\n".join(
        f"| {in_prose(name)} | {in_prose(str(version))} |" for name, version in packages.items() if version != "absent"
    )
    return f"| package | in the alignment |\n| --- | --- |\n{rows}"
