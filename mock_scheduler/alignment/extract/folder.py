"""Writes the folder of a reproduction: recording, weights, configuration, the candidate's code, script and README.

Contract: everything in it is named relative to it, so it can be moved; nothing outside of it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.alignment.extract.entry import EntryFiles
from mock_scheduler.alignment.extract.source import DivergedCandidate, apply_values
from mock_scheduler.alignment.plan.overrides import format_override
from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.config.align import CandidateConfig, MatrixConfig
from mock_scheduler.config.loading import ConfigSource, dump_config
from mock_scheduler.config.stored_code import FLAG
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import Plain, ReducedBatch, RunConfig, list_stored_code, load_config
from mock_scheduler.recording.writing.subset import write_subset
from mock_scheduler.support.digests import iterate_leaves
from mock_scheduler.support.foreign_files import refuse_link_out
from mock_scheduler.support.run_files import BASELINE_NAME, CHECKPOINTS_FOLDER, COMMAND_FILE, CONFIG_FILE
from mock_scheduler.support.text import count_of, in_code, in_prose, list_some
from mock_scheduler.support.versions import DISTRIBUTIONS, PACKAGE, read_package_version

RECORDING_FOLDER = "recording"
CHECKPOINT_FOLDER = "checkpoint"
SCRIPT_FILE = "reproduce.sh"
OUTPUT_FOLDER = "output"

_REPLAY = f" --recording {RECORDING_FOLDER}"
_SCRIPT = """\
#!/usr/bin/env bash
# Shows the divergence: exit code 1 and the verdict "diverged". Start it from the root of a checkout that has
# {packages}, or name that in MOCK_SCHEDULER_ROOT; PYTHON is the interpreter, else the checkout's
# .venv, else python3. What follows the script goes to mock-scheduler align, which runs no code that config.yaml names
# unless --run-stored-code is among it. The script says on stderr what it runs.
set -euo pipefail
fail() {{  # 1 is a verdict's
  echo "error: $1" >&2
  exit 5
}}
root="$(cd "${{MOCK_SCHEDULER_ROOT:-.}}" 2>/dev/null && pwd)" \
  || fail "there is no folder ${{MOCK_SCHEDULER_ROOT:-.}}; set MOCK_SCHEDULER_ROOT to the root of a checkout"
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd -P)"
case "$(cd "$root" && pwd -P)/" in "$here"/*)
  fail "$root is the reproduction itself, whose files are not run; set MOCK_SCHEDULER_ROOT to the root of a checkout"
esac
default=python3
[[ -x "$root/.venv/bin/python" ]] && default="$root/.venv/bin/python"
python="$(command -v "${{PYTHON:-$default}}")" \
  || fail "there is no program ${{PYTHON:-$default}}; set PYTHON to the interpreter"
case "$python" in /*) ;; *) python="$PWD/$python" ;; esac
cd "$here"
export PYTHONPATH="$root${{PYTHONPATH:+:$PYTHONPATH}}"
# -P: a module beside this script is imported by its name as an entry alone.
command=("$python" -P -m mock_scheduler.cli align {config} --config-path .{options}
  --output-dir {output} --overwrite "$@")
printf 'runs in %q:' "$here" >&2
printf ' %q' "PYTHONPATH=$PYTHONPATH" "${{command[@]}}" >&2
echo >&2
code=0
"${{command[@]}}" || code=$?
if [[ "$code" == 1 ]] && ! "$python" -P -c "import {imports}" 2>/dev/null; then
  fail "$python could not run it; start this from the root of a checkout with its .venv, or set PYTHON"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights with which a reproduction begins: ``checkpoint``, or where it is ``None`` the seed's initial ones.

    ``first_step``, ``last_step``: the trained steps, the first divergence's among them. ``text``: in
    words. ``root``: no link of the checkpoint may lead out of this folder.
    """

    checkpoint: Path | None
    root: Path
    first_step: int
    last_step: int
    text: str


def choose_weights(source: DivergedCandidate) -> Weights:
    """Chooses the shortest way to the weights of the divergent step; raises ``ConfigError`` for a broken checkpoint."""
    step, resumed, reductions = source.step, source.baseline.resume_from_checkpoint, source.reductions
    last_step = max(step, *(reductions.first_trained_step(config) for config in (source.baseline, source.candidate)))
    start = 0 if resumed is None else _find_start(source, Path(resumed))
    at_step = source.baseline_dir / CHECKPOINTS_FOLDER / reductions.checkpoint_name(step)
    refuse_link_out(at_step, source.align_dir)
    is_there = step > start and reductions.next_step(at_step) == step
    if is_there and reductions.begins_alike(source.baseline, source.candidate):
        text = f"the baseline's checkpoint of step {step}, from which both sides begin"
        return Weights(checkpoint=at_step, root=source.align_dir, first_step=step, last_step=last_step, text=text)
    text = reductions.describe_seed(source.baseline)
    if resumed is not None:
        text = f"the checkpoint of step {start} from which the baseline began"
    if step > start:
        why = "has none that the candidate could begin from" if is_there else "left none"
        text += (
            f"; the {step - start} steps before step {step} are kept, with as many groups, since the baseline {why} at "
            f"step {step}"
        )
    checkpoint = None if resumed is None else Path(resumed)
    root = checkpoint or source.align_dir
    return Weights(checkpoint=checkpoint, root=root, first_step=start, last_step=last_step, text=text)


def write_reproduction(
    source: DivergedCandidate,
    folder: Path,
    *,
    reduction: ReducedBatch,
    groups: Mapping[int, Sequence[GroupKey]],
    weights: Weights,
    entries: Sequence[EntryFiles],
) -> RunConfig:
    """Writes everything but the README to an empty folder, and returns the configuration.

    ``groups``: the kept ones by step. Raises ``RecordingError`` where a recorded step cannot be read.
    """
    checkpoint = None
    if weights.checkpoint is not None:
        checkpoint = f"{CHECKPOINT_FOLDER}/{source.reductions.checkpoint_name(weights.first_step)}"
    config = _build_config(source, reduction, checkpoint=checkpoint)
    promised = {field.name for field in source.reader.manifest.contract.fields}
    contract = {name: value for name, value in reduction.values.items() if name in promised}
    write_subset(source.reader, str(folder / RECORDING_FOLDER), groups, contract=contract)
    if weights.checkpoint is not None and checkpoint is not None:
        source.reductions.copy_checkpoint(weights.checkpoint, folder / checkpoint, reduction, root=weights.root)
    for entry in entries:
        entry.copy_to(folder)
    (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    write_script(folder, config=Path(CONFIG_FILE).stem, options=_REPLAY, packages=source.program.packages)
    # As it will be loaded: what cannot be is said now, and not by the reproduction.
    overrides = tuple(config.align.candidates[0].overrides)
    loaded = ConfigSource(config_name=Path(CONFIG_FILE).stem, config_path=str(folder), overrides=overrides)
    load_config(loaded, source.program)
    return config


def write_script(folder: Path, *, config: str, options: str, packages: Sequence[str]) -> None:
    """Writes the script. options: of ``align``, after a space each. packages: of the program, beside the library's."""
    script = folder / SCRIPT_FILE
    script.write_text(
        _SCRIPT.format(
            config=config,
            options=options,
            output=OUTPUT_FOLDER,
            packages=" and ".join(filter(_is_module, (PACKAGE, *packages))),
            imports=", ".join(filter(_is_module, ("torch", "mock_scheduler.cli", *packages))),
        ),
        encoding="utf-8",
    )
    script.chmod(0o755)


def _is_module(name: str) -> bool:
    """Says whether a name can stand in the script as it is."""
    return all(part.isascii() and part.isidentifier() for part in name.split("."))


def _build_config(source: DivergedCandidate, reduction: ReducedBatch, *, checkpoint: str | None) -> RunConfig:
    suffix = f"-{BASELINE_NAME}"
    values: dict[str, Plain] = {
        **reduction.values,
        "exp_name": f"{source.baseline.exp_name.removesuffix(suffix)}-reproduction",
        "output_dir": OUTPUT_FOLDER,
        **source.program.folder_keys,
        "resume_from_checkpoint": checkpoint,
        "rollout_mock.enable": True,
        "rollout_mock.mode": "mock",
        "rollout_mock.dump_dir": RECORDING_FOLDER,
        "rollout_mock.retention.keep_last": None,
    }
    config = apply_values(source.baseline, values)
    own = {"output_dir": None, "baseline": [], "candidates": [_candidate(source, reduction)], "matrix": MatrixConfig()}
    return config.model_copy(update={"align": config.align.model_copy(update=own)})


def _candidate(source: DivergedCandidate, reduction: ReducedBatch) -> CandidateConfig:
    """Returns the candidate, with the keys needed beside the batch's."""
    further = source.reductions.follow_batch(source.candidate, reduction)
    added = [format_override(key, value) for key, value in further.items() if key not in source.own_keys]
    if not added:
        return source.change
    return source.change.model_copy(update={"overrides": [*source.change.overrides, *added]})


def _find_start(source: DivergedCandidate, checkpoint: Path) -> int:
    step = source.reductions.next_step(checkpoint)
    if step is None:
        raise ConfigError(f"the checkpoint {checkpoint} cannot be used: there is none any more")
    return step


def needed_flag(folder: Path) -> str:
    """Returns the option, after a space, without which the script runs nothing; empty where it needs none."""
    is_command = (folder / COMMAND_FILE).is_file()
    return f" {FLAG}" if is_command or list_stored_code(folder / CONFIG_FILE) else ""


README_FILE = "README.md"

_NUM_GROUPS_NAMED = 8


def write_readme(
    folder: Path,
    source: DivergedCandidate,
    config: RunConfig,
    *,
    reduction: ReducedBatch,
    groups: Mapping[int, Sequence[GroupKey]],
    num_all: int,
    weights: Weights,
    entries: Sequence[EntryFiles],
    remarks: Sequence[str],
) -> None:
    """Writes ``README.md``. ``remarks``: the findings of the reproduction's check, in sentences."""
    change = config.align.candidates[0]
    sections = [
        f"# {change.name} diverges from its baseline",
        f"In the alignment that this was cut from:\n\n> {in_prose(source.sentence)}",
        "\n".join(map(in_prose, remarks)),
        "## Run it\n\n"
        "From the root of a checkout, or with `MOCK_SCHEDULER_ROOT=…`; `PYTHON=…` is another interpreter:\n\n"
        f"```bash\nbash {SCRIPT_FILE}{needed_flag(folder)}\n```\n\n"
        f"Expected: `{change.name}` is **diverged**, exit code 1. It trains a baseline and the candidate on the "
        "recording here; no rollout is played.",
        "## What differs\n\n" + _describe_change(source, config, entries),
        "## What is here\n\n"
        + _describe_files(source, reduction, groups, num_all=num_all, weights=weights, entries=entries),
        "## Versions\n\n" + _describe_versions(source),
    ]
    (folder / README_FILE).write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _describe_change(source: DivergedCandidate, config: RunConfig, entries: Sequence[EntryFiles]) -> str:
    change = config.align.candidates[0]
    lines = [f"- {in_code(override)}" for override in change.overrides]
    for entry in entries:
        runs = [source.baseline_entry, source.candidate_entry]
        who = (
            "both run" if runs == [entry.module] * 2 else "it runs" if runs[1] == entry.module else "the baseline runs"
        )
        module = in_code(f"python -m {entry.module}")
        if entry.paths:
            lines.append(f"- {who} as {module}, whose files are copied here")
        elif not entry.is_own:
            lines.append(f"- {who} as {module}, which must be installed: {in_prose(entry.left)}")
    if change.python is not None:
        lines.append(f"- it runs with another interpreter, {in_code(change.python)}, which is not here: see versions")
    return "\n".join(lines) or "- nothing is configured otherwise: the candidate repeats the baseline"


def _describe_files(
    source: DivergedCandidate,
    reduction: ReducedBatch,
    groups: Mapping[int, Sequence[GroupKey]],
    *,
    num_all: int,
    weights: Weights,
    entries: Sequence[EntryFiles],
) -> str:
    named = [f"group {group_id}/episode {episode_id}" for _, group_id, episode_id in groups[max(groups)]]
    steps = f"step {min(groups)}" if len(groups) == 1 else f"steps {min(groups)} to {max(groups)}"
    before = dict(iterate_leaves(source.baseline.model_dump(mode="json")))
    changed = ", ".join(in_code(f"{key}={value}") for key, value in reduction.values.items() if value != before[key])
    lines = [
        f"- `{RECORDING_FOLDER}`: {steps}, {reduction.num_groups} of {count_of(num_all, 'group')}, whole "
        f"({list_some(named, _NUM_GROUPS_NAMED, ', ')})",
        f"- weights: {weights.text}" + (f" (`{CHECKPOINT_FOLDER}`)" if weights.checkpoint else ""),
        f"- `{CONFIG_FILE}`: the baseline's whole configuration, and the candidate in its section `align`. What is not "
        f"as it was: {changed}",
    ]
    paths = dict.fromkeys(path for entry in entries for path in entry.paths)
    if paths:
        lines.append(
            f"- {', '.join(in_code(str(path)) for path in paths)}: the code of the entries, with the imports that its "
            "source names; modules that are loaded by a name made at run time, and data files, are not"
        )
    return "\n".join(lines)


def _describe_versions(source: DivergedCandidate) -> str:
    """Lists the packages with their versions when the rollouts were recorded, and when they were cut."""
    provenance = source.reader.manifest.provenance
    recorded = provenance.get("packages")
    packages = recorded if isinstance(recorded, Mapping) else {}
    rows = [("python", str(provenance.get("python", "")), sys.version.split()[0])]
    for name, distributions in DISTRIBUTIONS.items():
        then, now = packages.get(name), read_package_version(*distributions)
        if then is not None or now is not None:
            rows.append((name, str(then or "none"), now or "none"))
    table = "\n".join(f"| {name} | {in_prose(then)} | {now} |" for name, then, now in rows)
    return f"| package | when recorded | when extracted |\n| --- | --- | --- |\n{table}"
