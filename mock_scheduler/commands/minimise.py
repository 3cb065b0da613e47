"""``mock-scheduler minimise``: finds the smallest case of a diverged candidate by aligning smaller and smaller ones.

Contract: a case with a failed run, or without the divergence, counts as one without the fault.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mock_scheduler.alignment.minimise.minimise import minimise
from mock_scheduler.alignment.minimise.space import ReductionSpace, build_space
from mock_scheduler.alignment.minimise.trials import AlignOnce, Trials, only_candidate, remember
from mock_scheduler.alignment.plan.overrides import expand_candidates
from mock_scheduler.alignment.runs.run_store import open_folder
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.config.stored_code import Use
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, print_lines
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import ConfigLoader, Program, check_stored_code, find_program
from mock_scheduler.run_folder.command_folder import FolderMarker, claim_folder
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.run_files import ALIGN_FILE
from mock_scheduler.verdict.verdict import VerdictKind

MINIMISE_FILE = "minimise.json"
MINIMISE_MARKER = FolderMarker(
    command="mock-scheduler minimise",
    result_name=MINIMISE_FILE,
    text="made by mock-scheduler minimise; --overwrite may remove what is in this folder\n",
)
FOLDER = "minimise"
# They explain a divergence; the verdict does not rest on them.
_WITHOUT_EXPLANATION = ("align.proofs.localise=false", "align.proofs.consequence=false")


def align_once(
    config_name: str,
    config_path: Path,
    overrides: Sequence[str],
    candidate: CandidateConfig,
    output_dir: Path,
    *,
    takes_foreign: bool = False,
) -> VerdictKind:
    """Aligns one candidate, whatever the configuration lists; ``incomparable`` where a run fails.

    ``output_dir`` gets the files of ``mock-scheduler align``. ``takes_foreign``: as for ``AlignOptions``.
    Raises ``ConfigError`` before anything runs.
    """
    load = find_program(config_name, config_path).build_loader(config_name, config_path)
    only = only_candidate(load, overrides, candidate)
    try:
        run_align(
            config_name=config_name,
            config_path=config_path,
            overrides=(*overrides, *only, *_WITHOUT_EXPLANATION),
            # Code was asked for by the whole reduction.
            options=AlignOptions(output_dir=output_dir, run_stored_code=True, takes_foreign=takes_foreign),
            console=Console(file=io.StringIO(), width=120),
        )
    except AlignmentError:
        return VerdictKind.INCOMPARABLE
    result = load_json_object(output_dir / ALIGN_FILE)
    return VerdictKind(result["candidates"][0]["verdict"])


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseOptions:
    """Holds options of a reduction.

    Attributes:
        output_dir: the folder of all alignments; ``None`` is ``minimise`` in the configuration's.
        max_runs: alignments to spend at most, the first one, of the whole case, among them.
        overwrite: run everything anew.
        json_path: a further copy of the result.
        run_stored_code: also run the code that a stored configuration names, and take runs of another user again.
    """

    output_dir: Path | None = None
    max_runs: int = 60
    overwrite: bool = False
    json_path: Path | None = None
    run_stored_code: bool = False


def run_minimise(
    config_name: str,
    candidate_name: str,
    options: MinimiseOptions,
    *,
    config_path: Path,
    overrides: Sequence[str],
    align: AlignOnce | None = None,
    console: Console | None = None,
) -> int:
    """Shrink a diverged candidate, print the smallest case and its command; returns the verdict's exit code.

    Only a diverged or suspect candidate is reduced. ``{output_dir}/minimise.json`` has the result. Raises
    ``ConfigError`` for an unknown candidate, or one that cannot be run.
    """
    console = console or build_console()
    told = check_stored_code(config_name, config_path, use=Use.ALIGN, run_stored_code=options.run_stored_code)
    print_lines(console, told)
    program = find_program(config_name, config_path)
    load = remember(program.build_loader(config_name, config_path))
    space, baseline = _open_space(program, load, overrides, candidate_name)
    root = (options.output_dir or Path(space.baseline.output_dir) / FOLDER).resolve()
    with claim_folder(root, marker=MINIMISE_MARKER):
        open_folder(root, fresh=options.overwrite, marker=MINIMISE_MARKER)
        trial = Trials(
            program=program,
            space=space,
            load=load,
            align=align or partial(align_once, takes_foreign=options.run_stored_code),
            config_name=config_name,
            config_path=config_path,
            overrides=tuple(overrides),
            baseline=baseline,
            root=root,
            console=console,
        )
        verdict = trial.align_at(tuple(0 for _ in space.dimensions))
        if verdict not in (VerdictKind.DIVERGED, VerdictKind.SUSPECT):
            console.print(
                f"nothing to shrink: {candidate_name} is {verdict}, and only a diverged or suspect candidate shrinks",
                highlight=False,
            )
            return int(verdict.exit_code)
        trial.failing = (
            (VerdictKind.DIVERGED,) if verdict is VerdictKind.DIVERGED else (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
        )
        minimum = minimise(
            space.highest,
            trial.fails,
            is_valid=trial.is_valid,
            identify=trial.identify,
            max_runs=options.max_runs - len(trial.tried),
        )
        content = trial.describe(minimum, verdict)
        for path in (root / MINIMISE_FILE, *([options.json_path] if options.json_path else [])):
            save_json(path, content, sort_keys=False)
        trial.print_result(minimum, root / MINIMISE_FILE)
        return int(verdict.exit_code)


def _open_space(
    program: Program, load: ConfigLoader, overrides: Sequence[str], name: str
) -> tuple[ReductionSpace, tuple[str, ...]]:
    """Build the space of reductions; also returns the overrides of ``align.baseline``."""
    stated = tuple(load(overrides).align.baseline)
    baseline = load((*overrides, *stated))
    candidates = {item.name: item for item in expand_candidates(baseline.align, baseline.parallel)}
    if name not in candidates:
        raise ConfigError(f"there is no candidate {name!r}; the candidates are {', '.join(candidates)}")
    candidate = candidates[name]
    planned = load((*overrides, *stated, *candidate.overrides))
    return build_space(program, baseline, planned, candidate), stated
