"""Aligns reduced cases of a candidate one after another, and keeps the verdict of each.

Contract: each case is aligned in the folder of its workload, where a finished baseline is taken again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from mock_scheduler.alignment.minimise.minimise import Levels, Minimum
from mock_scheduler.alignment.minimise.space import Reduction, ReductionSpace
from mock_scheduler.alignment.plan.overrides import quote_value
from mock_scheduler.config.align import CandidateConfig, MatrixConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import ConfigLoader, Program, RunConfig
from mock_scheduler.support.digests import JSON, compute_json_digest
from mock_scheduler.support.text import count_of, join_words
from mock_scheduler.verdict.verdict import VerdictKind

#: Aligns one candidate: configuration name and folder, overrides, candidate, output folder; returns its verdict.
AlignOnce = Callable[[str, Path, Sequence[str], CandidateConfig, Path], VerdictKind]


@dataclass(slots=True)
class Trials:
    """Holds aligns cases of one space.

    ``baseline``: the overrides of ``align.baseline``. ``failing``: the verdicts with the fault.
    """

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
        """Aligns a case, and says whether the candidate still shows the fault."""
        return self.align_at(levels) in self.failing

    def is_valid(self, levels: Levels) -> bool:
        """Say whether both runs of a case are possible, and the candidate is not the baseline itself."""
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
        """Identify a case by its runs: two cases with one identity are the same."""
        reduction = self.space.build(levels)
        return reduction.shared, reduction.candidate.model_dump_json()

    def align_at(self, levels: Levels) -> VerdictKind:
        """Aligns one case."""
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
        self.console.print(text, highlight=False, soft_wrap=True)
        return verdict

    def describe(self, minimum: Minimum, verdict: VerdictKind) -> dict[str, JSON]:
        """Describe the result as JSON."""
        reduction = self.space.build(minimum.levels)
        return {
            "candidate": reduction.candidate.name,
            "verdict": str(verdict),
            "layout": reduction.layout,
            "overrides": list(reduction.shared),
            "candidate_overrides": list(reduction.candidate.overrides),
            "entry": reduction.candidate.entry or self.space.baseline.align.entry or self.program.entry,
            "python": reduction.candidate.python,
            "reduced": list(reduction.steps),
            "num_runs": len(self.tried),
            "is_complete": minimum.is_complete,
            "command": self.command(reduction),
            "tried": list(self.tried),
        }

    def command(self, reduction: Reduction) -> str:
        """Write the command for the reduced case, in a folder of its own."""
        overrides = self._with_shared(reduction)
        only = only_candidate(self.load, overrides, reduction.candidate)
        words = [self.config_name, *overrides, *only, "--config-path", str(self.config_path)]
        folder = self.root / f"smallest-{compute_json_digest(list(words))[:12]}"
        return join_words(["mock-scheduler", "align", *words, "--output-dir", str(folder)])

    def print_result(self, minimum: Minimum, path: Path) -> None:
        """Print the smallest case."""
        reduction = self.space.build(minimum.levels)
        own = [*reduction.candidate.overrides]
        if reduction.candidate.entry is not None:
            own.append(f"entry {reduction.candidate.entry}")
        if reduction.candidate.python is not None:
            own.append(f"python {reduction.candidate.python}")
        num_runs = len(self.tried)
        state = "" if minimum.is_complete else ", the limit of --max-runs; a smaller case may exist"
        lines = (
            f"still fails after {count_of(num_runs, 'alignment')}{state}",
            f"layout       {reduction.layout}",
            f"candidate    {' '.join(own)}",
            f"workload     {' '.join(reduction.shared) or 'as it was'}",
            f"result       {path}",
            f"see it with  {self.command(reduction)}",
        )
        for line in lines:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _with_shared(self, reduction: Reduction) -> tuple[str, ...]:
        """Return the command line's overrides with the reduced workload, after the configuration's own."""
        if not reduction.shared:
            return self.overrides
        return (*self.overrides, f"align.baseline={_quote_list([*self.baseline, *reduction.shared])}")


def only_candidate(load: ConfigLoader, overrides: Sequence[str], candidate: CandidateConfig) -> tuple[str, ...]:
    """Write the overrides for one candidate alone."""
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


def remember(load: ConfigLoader) -> ConfigLoader:
    """Make a loader with a memory: it loads nothing twice."""
    known: dict[tuple[str, ...], RunConfig] = {}

    def look_up(overrides: Sequence[str]) -> RunConfig:
        key = tuple(overrides)
        if key not in known:
            known[key] = load(key)
        return known[key]

    return look_up


def _quote_list(texts: Sequence[str]) -> str:
    return f"[{','.join(map(quote_value, texts))}]"
