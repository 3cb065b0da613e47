"""The further runs of localisation: their overrides, the size of their traces, and the names with room.

Contract: nothing is started here. All replay the alignment's recording where there is one, as the runs before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mock_scheduler.alignment.plan.overrides import quote_override, quote_value
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.config.instruments import TRACE_KINDS, LedgerKind, TraceKind
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.verdict.localisation import DifferingTensor, GraftKind

#: At least so many of the first tensors that differ are traced whole, however large they are.
_FEWEST_NAMES = 8
_CHOICES = "*.router.chosen_experts"


class MakeRun(Protocol):
    """Carries out a planned run with further overrides, in a folder of its own.

    Returns the run's ``output_dir`` and keeps it. Raises ``AlignmentError`` where it fails. ``name`` is unique.
    """

    def __call__(self, planned: PlannedRun, overrides: Sequence[str], name: str) -> Path:
        """Run it."""
        ...


def sketch_overrides(run: PlannedRun, last_step: int | None) -> list[str]:
    """Writes overrides for sketches of all tensors of every step, up to ``last_step``; ``None``: of all."""
    steps = "null" if last_step is None else f"'0-{last_step}'"
    return [*trace_overrides(run, "sketch", steps, ("*",)), *run.program.end_after(run.config, last_step)]


def full_overrides(run: PlannedRun, step: int, names: Sequence[str] | None) -> list[str]:
    """Writes overrides for whole tensors of one step, of the given names; ``None``: of all."""
    return [*trace_overrides(run, "full", f"'{step}'", names or ("*",)), *run.program.end_after(run.config, step)]


def graft_overrides(
    run: PlannedRun, *, level: str, kind: GraftKind, names: Sequence[str], place: tuple[int, int], trace: Path
) -> list[str]:
    """Writes overrides to put the reference's tensors in, and to trace the whole step.

    ``place``: step and update. ``trace``: the folder of the reference's tensors.
    """
    step, update = place
    return [
        *trace_overrides(run, level, f"'{step}'", ("*",)),
        *run.program.end_after(run.config, step),
        quote_override("graft.trace_dir", str(trace)),
        f"graft.names=[{','.join(map(quote_value, names))}]",
        f"graft.kind={kind}",
        f"graft.step={step}",
        f"graft.update={update}",
    ]


def estimate_bytes(comparison: TensorComparison, step: int, *, num_ranks: int, item_bytes: int) -> int:
    """Bounds the bytes of full traces of one step, by one process and by ``num_ranks`` ranks with all of it each."""
    elements = sum(item.num_elements + item.num_absent for item in comparison.differences if item.key.step == step)
    return elements * item_bytes * (1 + num_ranks)


def guess_bytes(run: PlannedRun, trace: TraceReader, *, num_ranks: int) -> int:
    """Guesses the same before anything but parameters and main gradients was traced, by a trace of any step.

    Each token has as many elements as the program says; each parameter its gradient, two moments and three copies.
    """
    step = trace.steps[0]
    footer = trace.footer(step)
    num_tokens = sum(footer.rows.lengths[row] for rows in footer.update_rows for row in rows)
    shapes = {key.name: trace.dtype_and_shape(key)[1] for key in trace.keys(step) if key.kind == "initial"}
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    vocabulary = max((shape[0] for name, shape in shapes.items() if "word_embeddings" in name), default=0)
    by_token = run.program.count_elements(run.config, vocabulary=vocabulary)
    if by_token is None:
        # A linear layer's outputs and inputs per token are its weight's two sizes, a norm's its one; with gradients.
        by_token = 4 * sum(sum(shape) for shape in shapes.values())
    num_updates = max(len(footer.update_rows), 1)
    item_bytes = 8 if run.config.precision == "float64" else 4
    return (num_tokens * by_token + 6 * num_updates * num_parameters) * item_bytes * (1 + num_ranks)


def choose_names(differing: Sequence[DifferingTensor], *, budget: int, bytes_by_element: int) -> list[str]:
    """Selects names of differing tensors, in order, as long as they fit; at least a few, and the choices of experts."""
    names: dict[str, None] = {}
    total = 0
    for item in differing:
        size = 0 if item.difference is None else item.difference.num_elements * bytes_by_element
        if len(names) >= _FEWEST_NAMES and total + size > budget and item.key.name not in names:
            break
        total += size
        names[item.key.name] = None
    has_experts = any(".mlp.router." in name or name.endswith(".mlp.experts") for name in names)
    return [*names, *([_CHOICES] if has_experts else [])]


def trace_overrides(
    run: PlannedRun,
    level: str,
    steps: str,
    names: Sequence[str],
    *,
    kinds: Sequence[TraceKind | LedgerKind] = TRACE_KINDS,
) -> list[str]:
    """Writes overrides for a trace of all ranks in these steps, whatever the run's own trace leaves out."""
    # One that is not the model's own, as of sketches before, must not take anything out.
    return [
        *(["rollout_mock.mode=mock"] if run.config.rollout_mock is not None else []),
        f"trace.level={level}",
        f"trace.kinds=[{','.join(kinds)}]",
        f"trace.patterns=[{','.join(map(quote_value, names))}]",
        "trace.exclude=[]",
        "trace.ranks=null",
        "trace.dump_every_n_steps=1",
        f"trace.steps={steps}",
    ]
