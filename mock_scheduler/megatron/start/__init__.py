"""Gives a run the start of its baseline: parameters, buffers and the optimizer's state, in any layout.

Nobody's training starts with the same weights under every layout. So before the first observed step a run compares its
state with the baseline's by canonical name, and puts the baseline's in the place of whatever differs: each whole tensor
is read from the trace (``source``), cut for this rank, and given up before the next one. A bfloat16 parameter is
its rounded wide copy afterwards. Then weights are perturbed, where the run is to measure noise.

Contract: collective; every rank must call, before its first forward pass, and all raise the same error or none. Where
both start alike, no bit is written. What was set is read back from where the optimizer updates it, after Megatron's own
copy from there. A state that cannot be set is named and refused before anything is changed. The optimizer's parameter
groups are left alone.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import count_updates
from mock_scheduler.megatron.perturbation import Perturbation, perturb_embedding, perturb_weights
from mock_scheduler.megatron.probe.state import read_state
from mock_scheduler.megatron.start.setting import StartSetting, call_together
from mock_scheduler.megatron.start.source import StartSource, write_start
from mock_scheduler.megatron.start.state import count_padding_rows, widen_buffers
from mock_scheduler.trace.start_report import StartReport, save_start

logger = logging.getLogger("mock_scheduler.start")


@torch.no_grad()
def apply_start(model: ObservedModel, run: AttachedRun, group: RankGroup) -> StartReport:
    """Compares a run's start with its baseline's, sets what differs, perturbs, and writes ``start.json`` on rank 0.

    A perturbation moves the weights, and from then on the embedding's output. Where updates come before the first
    observed step, it is called behind the last of them: a stage of a pipeline begins a step only when the one before
    has computed its own part.

    Without ``run.initial_state`` the run is a baseline itself: where it writes whole tensors, it stores the part of its
    start that its trace lacks.

    Raises:
        AlignmentError: the start cannot be set, or was set and is not there.
        TraceError: the baseline's files cannot be read, or this run's cannot be written.
    """
    model.gather_parameters()
    num_updates = count_updates(model, device=model.ranks.device)
    own = StartReport(step=run.first_step, num_updates=num_updates, num_padding_rows=_gather_padding(model, group))
    output_dir = Path(run.output_dir)
    if run.initial_state is not None:
        own = _start_as(Path(run.initial_state), model, own, group)
    elif run.trace.level == "full":
        has_moments = num_updates > 0
        call_together(lambda: write_start(model, output_dir, step=run.first_step, has_moments=has_moments), group)
    perturbation = Perturbation.build(run.perturbation)
    if perturbation is not None:
        perturb_weights(model, perturbation)
        for gpt in model.gpts():
            perturb_embedding(gpt, run.perturbation)
    report = replace(own, is_perturbed=perturbation is not None)
    is_writer = group.global_rank == 0
    call_together(lambda: save_start(output_dir, report) if is_writer else None, group)
    if is_writer:
        logger.info("%s", report.describe())
    return report


def _start_as(trace_dir: Path, model: ObservedModel, own: StartReport, group: RankGroup) -> StartReport:
    with ExitStack() as stack:
        source = call_together(lambda: stack.enter_context(StartSource(trace_dir, own.step)), group)
        start = StartSetting(source, model, group, num_updates=own.num_updates)
        start.check()
        widen_buffers(model)
        kinds = start.put()
    return replace(
        own,
        source=str(trace_dir),
        num_updates=start.num_updates,
        kinds=kinds,
        baseline_padding_rows=source.num_padding_rows,
    )


def _gather_padding(model: ObservedModel, group: RankGroup) -> dict[str, int]:
    """Returns the padding rows of the vocabulary on all stages, by name of the parameter."""
    own = {}
    for piece in read_state(model, "initial"):
        num_rows = count_padding_rows(piece.spec, model)
        if num_rows:
            own[piece.spec.name] = num_rows
    rows: dict[str, int] = {}
    for payload in group.gather(json.dumps(own).encode()):
        rows |= json.loads(payload)
    return dict(sorted(rows.items()))
