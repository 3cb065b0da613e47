"""Trains jobs of one world size in one process group: ``ranks ... -m tests.faults.worker JOBS_FILE``.

Each job's folder gets the trace of its one step, and ``done.json`` when all ranks have finished it: the metrics, how
often a fault fired by rank and update, and what the training ended with where it raised. Nothing is judged here.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.layouts.cases import parallel_of
from benchmarks.layouts.training import VOCAB_SIZE, random_batch
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TRACE_KINDS, TraceConfig, TraceKind
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.megatron.ordered_collectives import use_ordered_reductions
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime
from pipelines.megatron.trainer import PolicyTrainer
from tests.faults.cases import LONGEST_ROW, SEED, build_config
from tests.faults.catalogue import find_fault
from tests.faults.counting import Fired
from tests.faults.fault import Precision, Run
from tests.faults.injectors.patching import replaced

DONE_FILE = "done.json"
#: What a run that must not differ is traced with.
LIGHT_KINDS: tuple[TraceKind, ...] = (
    *("initial", "input", "score", "advantage", "output", "loss"),
    *("gradient", "gradient_norm", "optimizer", "parameter", "weight"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training.

    faults: ids of those put in together, none for a clean one. changes: as of ``cases.build_config``. is_light: only
    what the training ends with is traced, and what it begins with, not what modules compute.
    """

    folder: str
    run: Run
    precision: Precision
    faults: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    is_light: bool = False

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Job:
        """What ``asdict`` gave."""
        return cls(**{**values, "run": Run(**values["run"]), "faults": tuple(values["faults"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """metrics: of the step. error: what the training raised, else empty.

    acted: by fault and rank, how often it did its harm before the first update, and in each update.
    """

    metrics: dict[str, float]
    acted: dict[str, list[list[int]]]
    error: str

    @property
    def fired(self) -> dict[str, int]:
        """How often each fault did its harm, over all ranks."""
        return {name: sum(map(sum, by_rank)) for name, by_rank in self.acted.items()}


def train(job: Job) -> Outcome:
    """The one step of a job, from the canonical initial weights. Every rank must call it."""
    try:
        config = build_config(job.run, job.precision, changes=job.changes)
    except ValueError as refused:
        return Outcome(metrics={}, acted={name: [] for name in job.faults}, error=str(refused))
    counters = {name: Fired() for name in job.faults}
    metrics: dict[str, float] = {}
    error = ""
    trace = TraceConfig(level="full", kinds=[*(LIGHT_KINDS if job.is_light else TRACE_KINDS)])
    runtime = build_layout(config.parallel, seed=SEED)
    with ExitStack() as stack:
        stack.enter_context(use_ordered_reductions(config.order))
        for name, fired in counters.items():
            inject = find_fault(name).inject
            if inject is not None:
                stack.enter_context(inject(fired))
        ends = stack.enter_context(_counting_by_update(counters))
        batch = training_batch(config.rollout_form)
        try:
            learner = Learner(config, runtime, vocab_size=VOCAB_SIZE)
            with StepProbe(runtime, Path(job.folder), step=0, config=trace) as probe:
                metrics = learner.train_step(batch, step=0, probe=probe)
        except Exception as raised:  # noqa: BLE001 - the edge of the process: what is raised is the job's outcome
            error = f"{type(raised).__name__}: {raised}"
            print(traceback.format_exc(), file=sys.stderr)
    ends.append([fired.count for fired in counters.values()])
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, _count_in_between(ends))
    acted = {name: [counts[place] for counts in by_rank] for place, name in enumerate(counters)}
    return Outcome(metrics=metrics, acted=acted, error=error)


def training_batch(form: Literal["trajectory", "step"] = "trajectory") -> RolloutBatch:
    """Rows whose actions are of the whole vocabulary, so that every tp rank holds the targets of some."""
    return random_batch(SEED, longest=LONGEST_ROW, form=form, num_actions=VOCAB_SIZE - 2)


@contextmanager
def _counting_by_update(counters: Mapping[str, Fired]) -> Iterator[list[list[int]]]:
    """Notes the counts as each update begins."""
    ends: list[list[int]] = []

    def wrap(update: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: object, **options: object) -> object:
            ends.append([fired.count for fired in counters.values()])
            return update(*arguments, **options)

        return noted

    with replaced(PolicyTrainer, "update", wrap):
        yield ends


def _count_in_between(ends: Sequence[Sequence[int]]) -> list[list[int]]:
    """By fault, the counts before the first update and in each."""
    totals = zip(*ends, strict=True)
    return [[after - before for before, after in pairwise((0, *of_fault))] for of_fault in totals]


def main() -> None:
    """All jobs of the file, in order."""
    jobs = [Job.parse(values) for values in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    start_runtime(ParallelConfig.model_validate(parallel_of(jobs[0].run.layout)), seed=SEED)
    leave_layout()
    gc.freeze()  # each layout that is left looks through all objects that are not frozen
    for job in jobs:
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = train(job)
        dist.barrier()
        if dist.get_rank() == 0:
            partial = folder / f"{DONE_FILE}.part"
            partial.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            partial.rename(folder / DONE_FILE)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
