"""The README of a reproduction says how to run it, where it was cut from, and how it may differ from that."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mock_scheduler.align.extract.entry import EntryFiles
from mock_scheduler.align.extract.folder import CHECKPOINT_FOLDER, RECORDING_FOLDER, SCRIPT_FILE, Weights
from mock_scheduler.align.extract.source import DivergedCandidate
from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.program import ReducedBatch, RunConfig
from mock_scheduler.support.digests import iterate_leaves
from mock_scheduler.support.packages import DISTRIBUTIONS, read_package_version
from mock_scheduler.support.run_files import CONFIG_FILE
from mock_scheduler.support.text import count_of, list_some

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
    entry: EntryFiles,
    remarks: Sequence[str],
) -> None:
    """Writes ``README.md``. ``remarks``: the findings of the reproduction's check, in sentences."""
    change = config.align.candidates[0]
    sections = [
        f"# {change.name} diverges from its baseline",
        f"In the alignment that this was cut from:\n\n> {source.sentence}",
        "\n".join(remarks),
        "## Run it\n\n"
        "From the root of a checkout, or with `MOCK_SCHEDULER_ROOT=…`; `PYTHON=…` is another interpreter:\n\n"
        f"```bash\nbash {SCRIPT_FILE}\n```\n\n"
        f"Expected: `{change.name}` is **diverged**, exit code 1. It trains a baseline and the candidate on the "
        "recording here; no rollout is played.",
        "## What differs\n\n" + _describe_change(config, entry),
        "## What is here\n\n"
        + _describe_files(source, reduction, groups, num_all=num_all, weights=weights, entry=entry),
        "## Versions\n\n" + _describe_versions(source),
    ]
    (folder / README_FILE).write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _describe_change(config: RunConfig, entry: EntryFiles) -> str:
    change = config.align.candidates[0]
    lines = [f"- `{override}`" for override in change.overrides]
    if entry.paths:
        lines.append(f"- it runs as `python -m {change.entry}`, whose files are copied here")
    elif not entry.is_own:
        lines.append(f"- it runs as `python -m {change.entry}`, which must be installed: {entry.left}")
    if change.python is not None:
        lines.append(f"- it runs with another interpreter, `{change.python}`, which is not here: see versions")
    return "\n".join(lines) or "- nothing is configured otherwise: the candidate repeats the baseline"


def _describe_files(
    source: DivergedCandidate,
    reduction: ReducedBatch,
    groups: Mapping[int, Sequence[GroupKey]],
    *,
    num_all: int,
    weights: Weights,
    entry: EntryFiles,
) -> str:
    named = [f"group {group_id}/episode {episode_id}" for _, group_id, episode_id in groups[max(groups)]]
    steps = f"step {min(groups)}" if len(groups) == 1 else f"steps {min(groups)} to {max(groups)}"
    before = dict(iterate_leaves(source.baseline.model_dump(mode="json")))
    changed = ", ".join(f"`{key}={value}`" for key, value in reduction.values.items() if value != before[key])
    lines = [
        f"- `{RECORDING_FOLDER}`: {steps}, {reduction.num_groups} of {count_of(num_all, 'group')}, whole "
        f"({list_some(named, _NUM_GROUPS_NAMED, ', ')})",
        f"- weights: {weights.text}" + (f" (`{CHECKPOINT_FOLDER}`)" if weights.checkpoint else ""),
        f"- `{CONFIG_FILE}`: the baseline's whole configuration, and the candidate in its section `align`. What is not "
        f"as it was: {changed}",
    ]
    if entry.paths:
        lines.append(
            f"- {', '.join(f'`{path}`' for path in entry.paths)}: the candidate's code, with the imports that its "
            "source names; modules that are loaded by a name made at run time, and data files, are not"
        )
    return "\n".join(lines)


def _describe_versions(source: DivergedCandidate) -> str:
    """Returns a table of the versions that recorded the rollouts, and of those that cut them."""
    provenance = source.reader.manifest.provenance
    recorded = provenance.get("packages")
    packages = recorded if isinstance(recorded, Mapping) else {}
    rows = [("python", str(provenance.get("python", "")), sys.version.split()[0])]
    for name, distributions in DISTRIBUTIONS.items():
        then, now = packages.get(name), read_package_version(*distributions)
        if then is not None or now is not None:
            rows.append((name, str(then or "none"), now or "none"))
    table = "\n".join(f"| {name} | {then} | {now} |" for name, then, now in rows)
    return f"| package | when recorded | when extracted |\n| --- | --- | --- |\n{table}"
