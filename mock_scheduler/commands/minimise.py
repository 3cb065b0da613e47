"""``mock-scheduler minimise``: the smallest case in which a candidate is still diverged, found by alignments of it.

Contract: every alignment goes to a folder of its workload, where a baseline that has run already is taken again. A
candidate whose run fails, or that is no longer diverged, counts as one that does not show the fault.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from mock_scheduler.align.minimise.minimise import Levels, Minimum, minimise
from mock_scheduler.align.minimise.space import Reduction, ReductionSpace, build_space
from mock_scheduler.align.plan.matrix import expand_candidates
from mock_scheduler.align.plan.overrides import quote_value
from mock_scheduler.align.runs.resume import open_folder
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.config.align import CandidateConfig, MatrixConfig
from mock_scheduler.display.console import build_console
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import ConfigLoader, Program, RunConfig, find_program
from mock_scheduler.run_folder.command_folder import FolderMarker, claim_folder
from mock_scheduler.support.digests import JSON, compute_json_digest
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.run_files import ALIGN_FILE
from mock_scheduler.support.text import count_of, join_words
from mock_scheduler.verdict.verdict import VerdictKind

MINIMISE_FILE = "minimise.json"
MINIMISE_MARKER = FolderMarker(
    command="mock-scheduler minimise",
    result_name=MINIMISE_FILE,
    text="made by mock-scheduler minimise; --overwrite may remove what is in this folder\n",
)
FOLDER = "minimise"
# They narrow a divergence down and say what it does to training; the verdict does not rest on them.
_WITHOUT_EXPLANATION = ("align.proofs.localise=false", "align.proofs.consequence=false")

#: As ``align_once``.
AlignOnce = Callable[[str, Path, Sequence[str], CandidateConfig, Path], VerdictKind]


def align_once(
    config_name: str, config_path: Path, overrides: Sequence[str], candidate: CandidateConfig, output_dir: Path
) -> VerdictKind:
    """The verdict on one candidate, whatever the configuration lists; ``incomparable`` where a run fails.

    The alignment and its files are those of ``mock-scheduler align``, in ``output_dir``. Raises ``ConfigError`` before
    anything runs.
    """
    load = find_program(config_name, config_path).build_loader(config_name, config_path)
    only = only_candidate(load, overrides, candidate)
    try:
        run_align(
            config_name=config_name,
            config_path=config_path,
            overrides=(*overrides, *only, *_WITHOUT_EXPLANATION),
            options=AlignOptions(output_dir=output_dir),
            console=Console(file=io.StringIO(), width=120),
        )
    except AlignmentError:
        return VerdictKind.INCOMPARABLE
    result = load_json_object(output_dir / ALIGN_FILE)
    return VerdictKind(result["candidates"][0]["verdict"])


def only_candidate(load: ConfigLoader, overrides: Sequence[str], candidate: CandidateConfig) -> tuple[str, ...]:
    """The overrides that make a candidate the only one."""
    fields = {"name": quote_value(candidate.name)}
    if candidate.overrides:
        fields["overrides"] = _quote_list(candidate.overrides)
    if candidate.entry is not None:
        fields["entry"] = quote_value(candidate.entry)
    if candidate.python is not None:
        fields["python"] = quote_value(candidate.python)
    if candidate.exact is not None:
        fields["exact"] = str(candidate.exact).lower()
    entry = ",".join(f"{key}:{value}" for key, value in fields.items())
    has_matrix = load(overrides).align.matrix != MatrixConfig()
    return (f"align.candidates=[{{{entry}}}]", *(["~align.matrix"] if has_matrix else []))


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimiseOptions:
    """``output_dir``: ``None`` is ``minimise`` in the configuration's. ``max_runs``: alignments to spend at
    most, that of the candidate as it is among them."""

    output_dir: Path | None = None
    max_runs: int = 60
    overwrite: bool = False
    json_path: Path | None = None


def run_minimise(
    config_name: str,
    candidate_name: str,
    options: MinimiseOptions,
    *,
    config_path: Path,
    overrides: Sequence[str],
    align: AlignOnce = align_once,
    console: Console | None = None,
) -> int:
    """Shrink a diverged candidate, print what is left and the command that shows it; returns the verdict's exit code.

    A candidate that is neither diverged nor suspect is not reduced. ``{output_dir}/minimise.json`` has the result.
    Raises ``ConfigError`` for a candidate that there is not, or that cannot be run.
    """
    console = console or build_console()
    program = find_program(config_name, config_path)
    load = remember(program.build_loader(config_name, config_path))
    space, baseline = _open_space(program, load, overrides, candidate_name)
    root = (options.output_dir or Path(space.baseline.output_dir) / FOLDER).resolve()
    with claim_folder(root, marker=MINIMISE_MARKER):
        open_folder(root, fresh=options.overwrite, marker=MINIMISE_MARKER)
        trial = _Trial(
            program=program,
            space=space,
            load=load,
            align=align,
            config_name=config_name,
            config_path=config_path,
            overrides=tuple(overrides),
            baseline=baseline,
            root=root,
            console=console,
        )
        verdict = trial.align_at(tuple(0 for _ in space.dimensions))
        if verdict not in (VerdictKind.DIVERGED, VerdictKind.SUSPECT):
            console.print(f"nothing to reduce: {candidate_name} is {verdict}", highlight=False, markup=False)
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
    """What can be reduced, and the overrides of ``align.baseline``."""
    stated = tuple(load(overrides).align.baseline)
    baseline = load((*overrides, *stated))
    candidates = {item.name: item for item in expand_candidates(baseline.align, baseline.parallel)}
    if name not in candidates:
        raise ConfigError(f"there is no candidate {name!r}; they are {', '.join(candidates)}")
    candidate = candidates[name]
    planned = load((*overrides, *stated, *candidate.overrides))
    return build_space(program, baseline, planned, candidate), stated


def remember(load: ConfigLoader) -> ConfigLoader:
    """The same loader, which loads nothing twice."""
    known: dict[tuple[str, ...], RunConfig] = {}

    def look_up(overrides: Sequence[str]) -> RunConfig:
        key = tuple(overrides)
        if key not in known:
            known[key] = load(key)
        return known[key]

    return look_up


@dataclass(slots=True)
class _Trial:
    """Runs cases and says what they are; ``baseline``: the overrides that the configuration states for it."""

    program: Program
    space: ReductionSpace
    load: ConfigLoader
    align: AlignOnce
    config_name: str
    config_path: Path
    overrides: tuple[str, ...]
    baseline: tuple[str, ...]
    root: Path
    console: Console
    failing: tuple[VerdictKind, ...] = (VerdictKind.DIVERGED,)
    tried: list[dict[str, JSON]] = field(default_factory=list)

    def fails(self, levels: Levels) -> bool:
        """Whether the candidate still shows the fault."""
        return self.align_at(levels) in self.failing

    def is_valid(self, levels: Levels) -> bool:
        """Whether both runs of a case can be made, and the candidate is not the baseline itself."""
        reduction = self.space.build(levels)
        if reduction.is_baseline:
            return False
        shared = (*self.overrides, *self.baseline, *reduction.shared)
        try:
            self.load(shared)
            self.load((*shared, *reduction.candidate.overrides))
        except ConfigError:
            return False
        return True

    def identify(self, levels: Levels) -> tuple[tuple[str, ...], str]:
        """What a case runs."""
        reduction = self.space.build(levels)
        return reduction.shared, reduction.candidate.model_dump_json()

    def align_at(self, levels: Levels) -> VerdictKind:
        """Align one case."""
        reduction = self.space.build(levels)
        folder = self.root / f"workload-{compute_json_digest(list(reduction.shared))[:12]}"
        started_s = time.perf_counter()
        verdict = self.align(
            self.config_name, self.config_path, self._with_shared(reduction), reduction.candidate, folder
        )
        seconds = time.perf_counter() - started_s
        self.tried.append(
            {
                "reduced": list(reduction.steps),
                "layout": reduction.layout,
                "verdict": str(verdict),
                "seconds": round(seconds, 3),
            }
        )
        what = ", ".join(reduction.steps) or "as it is"
        text = f"{len(self.tried) - 1:3d}  {verdict}  {reduction.layout}: {what}  ({seconds:.1f} s)"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        return verdict

    def describe(self, minimum: Minimum, verdict: VerdictKind) -> dict[str, JSON]:
        """The result as JSON."""
        reduction = self.space.build(minimum.levels)
        return {
            "candidate": reduction.candidate.name,
            "verdict": str(verdict),
            "layout": reduction.layout,
            "overrides": list(reduction.shared),
            "candidate_overrides": list(reduction.candidate.overrides),
            "entry": reduction.candidate.entry or self.program.entry,
            "python": reduction.candidate.python,
            "reduced": list(reduction.steps),
            "num_runs": len(self.tried),
            "is_complete": minimum.is_complete,
            "command": self.command(reduction),
            "tried": list(self.tried),
        }

    def command(self, reduction: Reduction) -> str:
        """What shows the reduced case, in a folder that no other case and no alignment of the user's has."""
        overrides = self._with_shared(reduction)
        only = only_candidate(self.load, overrides, reduction.candidate)
        words = [self.config_name, *overrides, *only, "--config-path", str(self.config_path)]
        folder = self.root / f"smallest-{compute_json_digest(list(words))[:12]}"
        return join_words(["mock-scheduler", "align", *words, "--output-dir", str(folder)])

    def print_result(self, minimum: Minimum, path: Path) -> None:
        """Say what is left."""
        reduction = self.space.build(minimum.levels)
        own = [*reduction.candidate.overrides]
        if reduction.candidate.entry is not None:
            own.append(f"entry {reduction.candidate.entry}")
        if reduction.candidate.python is not None:
            own.append(f"python {reduction.candidate.python}")
        num_runs = len(self.tried)
        were = "was" if num_runs == 1 else "were"
        state = "" if minimum.is_complete else f", which {were} all that it may take: it may not be the smallest"
        lines = (
            f"still fails after {count_of(num_runs, 'alignment')}{state}",
            f"layout       {reduction.layout}",
            f"candidate    {' '.join(own)}",
            f"workload     {' '.join(reduction.shared) or 'as it was'}",
            f"result       {path}",
            f"see it with  {self.command(reduction)}",
        )
        for line in lines:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _with_shared(self, reduction: Reduction) -> tuple[str, ...]:
        """The command line with the reduced workload, which counts after what the configuration states."""
        if not reduction.shared:
            return self.overrides
        return (*self.overrides, f"align.baseline={_quote_list([*self.baseline, *reduction.shared])}")


def _quote_list(texts: Sequence[str]) -> str:
    return f"[{','.join(map(quote_value, texts))}]"
