"""Runs faults of the catalogue beside what they are held against, and judges each as soon as its training has ended.

Contract: every trace lies under ``root`` and is deleted when nothing needs it any more. References come first, since
all of them are of one process: the plain one, the perturbed ones, and for each layout the one that adds in its order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.layouts.cases import parallel_of
from mock_scheduler.comparison.bounds.bounds import EXACT
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.divergences import count_before
from mock_scheduler.verdict.wording.divergences import describe_divergence
from tests.faults.cases import reference_of, world_size
from tests.faults.fault import Fault, Precision, Run
from tests.faults.matrix.evidence import Evidence
from tests.faults.matrix.judging import (
    Judgement,
    describe_place,
    is_called,
    is_placed,
    run_proofs,
)
from tests.faults.runs import run_jobs, silent_groups, without_allowance
from tests.faults.worker import Job, Outcome

Role = Literal["reference", "perturbed", "emulated", "clean", "fault", "quiet", "silent"]
"""What a training is for. quiet: a clean run of a silent layout; silent: one with the faults that must not show."""

CLEAN = "none"
"""The name of a row without a fault."""

_LOSS = TraceKey(step=0, update=0, kind="loss", name="mean.total_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One training of a campaign; equal parts are trained once. number: of the perturbation."""

    role: Role
    run: Run
    faults: tuple[str, ...] = ()
    number: int = 0


@dataclass(kw_only=True)
class Campaign:
    """All of one precision."""

    root: Path
    precision: Precision
    faults: Sequence[Fault]
    num_perturbed: int
    on_judged: Callable[[Judgement], None]
    outcomes: dict[Part, Outcome] = field(default_factory=dict)
    noises: dict[Run, NoiseBounds | None] = field(default_factory=dict)
    silent: dict[str, bool | None] = field(default_factory=dict)
    emulates: dict[Run, bool] = field(default_factory=dict)

    def run(self) -> Iterator[Judgement]:
        """Every clean layout and every fault, in the order in which their trainings end."""
        judged: list[Judgement] = []
        for part in self._train([*self._references(), *self._candidates(), *self._silent_parts()]):
            if part.role in ("clean", "fault"):
                judged.append(self._judge(part))
                self.on_judged(judged[-1])
                if part.role == "fault":
                    shutil.rmtree(self._folder(part))
            elif part.role == "silent":
                self._judge_silent(part)
        again = [
            Part(role="silent", run=fault.silent, faults=(fault.id,))
            for fault in self.faults
            if self.silent.get(fault.id) is not True
        ]
        for part in self._train([part for part in again if part not in self.outcomes]):
            self._judge_silent(part)
        yield from (replace(item, is_silent=self.silent.get(item.fault)) for item in judged)

    def _references(self) -> list[Part]:
        parts = []
        for run in dict.fromkeys(reference_of(fault.shows) for fault in self.faults):
            parts.append(Part(role="reference", run=run))
            parts += [Part(role="perturbed", run=run, number=number) for number in range(self.num_perturbed)]
        shown = dict.fromkeys(without_allowance(fault.shows) for fault in self.faults)
        return [*parts, *(Part(role="emulated", run=run) for run in shown)]

    def _candidates(self) -> list[Part]:
        clean = dict.fromkeys(fault.shows for fault in self.faults if fault.inject is not None)
        return [
            *(Part(role="clean", run=run) for run in clean),
            *(Part(role="fault", run=fault.shows, faults=(fault.id,)) for fault in self.faults),
        ]

    def _silent_parts(self) -> list[Part]:
        groups = silent_groups(self.faults)
        quiet = dict.fromkeys(map(without_allowance, groups))
        together = [
            Part(role="silent", run=run, faults=tuple(fault.id for fault in group)) for run, group in groups.items()
        ]
        return [*(Part(role="quiet", run=run) for run in quiet), *together]

    def _train(self, parts: Sequence[Part]) -> Iterator[Part]:
        jobs = {str(self._folder(part)): part for part in parts}
        for job, outcome in run_jobs([self._job(part) for part in parts]):
            part = jobs[job.folder]
            self.outcomes[part] = outcome
            yield part

    def _job(self, part: Part) -> Job:
        run, changes = part.run, self._order(part)
        if part.role == "perturbed":
            changes = {"perturbation": {"seed": part.number}}
        elif part.role == "emulated":
            run = replace(run, layout="tp1-plain" if "plain" in run.layout.split("-") else "tp1")
        return Job(
            folder=str(self._folder(part)),
            run=run,
            precision=self.precision,
            faults=part.faults,
            changes=changes,
            is_light=part.role in ("quiet", "silent"),
        )

    def _order(self, part: Part) -> dict[str, Any]:
        """Groups of more than two ranks add in the order of their ranks, which one process can follow."""
        if part.role == "emulated":
            return {} if world_size(part.run) == 1 else {"order": {"emulate": parallel_of(part.run.layout)}}
        return {"order": {"ordered_reductions": True}} if world_size(part.run) > 2 else {}

    def _folder(self, part: Part) -> Path:
        names = "+".join(part.faults) if len(part.faults) < 2 else f"{len(part.faults)}-{part.faults[0]}"
        name = "_".join((part.role, part.run.model, part.run.layout, part.run.option, names, str(part.number)))
        return self.root / self.precision / name

    def _judge(self, part: Part) -> Judgement:
        outcome = self.outcomes[part]
        name = part.faults[0] if part.faults else f"{CLEAN} ({part.run.label})"
        fault = next((fault for fault in self.faults if (fault.id,) == part.faults), None)
        error = outcome.error
        if not error and fault is not None and fault.inject is not None and not outcome.fired[fault.id]:
            error = "the fault never fired"
        judgement = Judgement(
            fault=name,
            precision=self.precision,
            findings={},
            place="",
            sentence=error,
            is_placed=False,
            is_called=False,
            is_loss_equal=None,
            is_silent=None,
            acted=[] if fault is None else outcome.acted[fault.id],
            error=error,
        )
        if error:
            return judgement
        try:
            return self._judge_evidence(judgement, part, fault, self._evidence(part))
        except TraceError as refused:
            return replace(judgement, sentence=str(refused), error=str(refused))

    def _judge_evidence(self, judgement: Judgement, part: Part, fault: Fault | None, evidence: Evidence) -> Judgement:
        if fault is None and evidence.exact is not None:
            self.emulates[part.run] = all(item.bit_equal for item in evidence.exact.differences)
        first = evidence.divergences[0] if evidence.divergences else None
        sentence = "" if first is None else describe_divergence(count_before(first, evidence.strongest))
        return replace(
            judgement,
            findings=run_proofs(evidence),
            place=describe_place(first),
            sentence=sentence,
            is_placed=fault is not None and is_placed(first, fault.expected),
            is_called=fault is not None and is_called(sentence, fault.expected),
            is_loss_equal=None if fault is None or fault.inject is None else self._has_equal_loss(part),
        )

    def _evidence(self, part: Part) -> Evidence:
        reference = Part(role="reference", run=reference_of(part.run))
        emulated = Part(role="emulated", run=without_allowance(part.run))
        is_emulated = not self.outcomes[emulated].error and self.emulates.get(part.run, True)
        return Evidence(
            precision=self.precision,
            reference=self._folder(reference),
            candidate=self._folder(part),
            noise=self._noise(reference),
            # A proof that a clean run of the layout fails proves nothing of a fault.
            emulated=self._folder(emulated) if is_emulated else None,
            losses=(self.outcomes[reference].metrics["total_loss"], self.outcomes[part].metrics["total_loss"]),
        )

    def _noise(self, reference: Part) -> NoiseBounds | None:
        if not self.num_perturbed:
            return None
        if reference.run not in self.noises:
            perturbed = [replace(reference, role="perturbed", number=number) for number in range(self.num_perturbed)]
            self.noises[reference.run] = measure_noise(
                self._folder(reference), [self._folder(part) for part in perturbed], seeds=range(self.num_perturbed)
            )
        return self.noises[reference.run]

    def _has_equal_loss(self, part: Part) -> bool:
        clean = Part(role="clean", run=part.run)
        return torch.equal(_first_loss(self._folder(clean)), _first_loss(self._folder(part)))

    def _judge_silent(self, part: Part) -> None:
        """``True`` for those that are proved silent; those of a run that is not equal are left to be run alone."""
        outcome = self.outcomes[part]
        quiet = Part(role="quiet", run=without_allowance(part.run))
        is_equal = not outcome.error and _are_equal(self._folder(quiet), self._folder(part))
        for fault in (fault for fault in self.faults if fault.id in part.faults):
            has_fired = fault.inject is None or fault.is_idle_where_silent or outcome.fired[fault.id] > 0
            self.silent[fault.id] = is_equal and has_fired
        shutil.rmtree(self._folder(part))


def _first_loss(trace_dir: Path) -> torch.Tensor:
    with open_trace(trace_dir) as reader:
        return reader.merge(_LOSS).tensor


def _are_equal(clean: Path, other: Path) -> bool:
    compared = compare_trace_folders(clean, other, bounds=EXACT)
    is_equal = all(item.bit_equal for item in compared.differences) and bool(compared.differences)
    return is_equal and not compared.findings and not compared.candidate_conflicts
