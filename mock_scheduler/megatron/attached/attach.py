"""Attaches the instruments that a run file asks for to a training: ``mock_scheduler.megatron.attach``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from pydantic import ValidationError

from mock_scheduler.config.instruments import RUN_FILE_VARIABLE, AttachedRun
from mock_scheduler.config.problems import validation_problems
from mock_scheduler.determinism.agreement import RankGroup, TorchRankGroup, check_agreement, do_together
from mock_scheduler.determinism.guard import apply_deterministic_mode, check_took_effect, read_back
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.attached import NOT_ATTACHED, TrainingHandle
from mock_scheduler.megatron.attached.attached_training import AttachedTraining, Attachment
from mock_scheduler.megatron.attached.run_files import RunFiles, edge
from mock_scheduler.megatron.attached.statements import gather_statements
from mock_scheduler.megatron.emulation.follow import follow
from mock_scheduler.megatron.followable import check_followable
from mock_scheduler.megatron.observed_model import ObservedModel, check_layout, layout_of, observe_model
from mock_scheduler.megatron.ordered_collectives import OrderedReductions
from mock_scheduler.megatron.start import apply_start
from mock_scheduler.support.foreign_files import read_text
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.selection import check_trace_ranks


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    vocab_size: int | None = None,
    prefix: str = "",
    run: AttachedRun | str | Path | None = None,
) -> TrainingHandle:
    """Attaches what a run file asks for to a training, after it has built its model and its optimizer.

    Every rank must call it at the same place; it communicates where something is asked. Without ``run``, and without
    ``MOCK_SCHEDULER_RUN`` in the environment, it does nothing and costs nothing.

    What is wrong with the run, layout or model ends every rank here, with ``error.json`` in the output folder.

    Args:
        model_chunks: of this rank, as Megatron's schedules take them.
        optimizer: of ``get_megatron_optimizer``.
        vocab_size: without padding; ``None``: the run file's, else the model's own, padded one.
        prefix: the beginning of all names in the trace, as ``critic.``, of one of several models.
        run: what is asked, or the file that says it; ``None``: the file of ``MOCK_SCHEDULER_RUN``.

    Returns:
        The training's end of the instruments.
    """
    asked = run if run is not None else os.environ.get(RUN_FILE_VARIABLE) or None
    if asked is None:
        return NOT_ATTACHED
    started_s = time.time()
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    if not dist.is_initialized():
        _refuse_without_processes(load_run(asked), started_s)
    ranks = TorchRankGroup(next(chunks[0].parameters()).device)
    config = do_together(ranks, lambda: load_run(asked))
    with edge(config, ranks.global_rank, started_s):
        return _attach(config, chunks, optimizer, ranks, vocab_size=vocab_size, prefix=prefix, started_s=started_s)


def _refuse_without_processes(run: AttachedRun, started_s: float) -> NoReturn:
    with edge(run, int(os.environ.get("RANK", "0")), started_s):
        raise ConfigError(
            "attach was called where torch.distributed is not initialized; expected a model of Megatron-core, behind "
            "init_process_group and parallel_state.initialize_model_parallel. A training in plain torch is traced by "
            "mock_scheduler.plain_torch.tracing.trace_training instead, and its traces are compared by "
            "mock-scheduler compare (docs/any_program.md)"
        )


def load_run(asked: AttachedRun | str | Path) -> AttachedRun:
    """Reads a run file.

    Raises:
        ConfigError: it cannot be read; lists all wrong keys.
    """
    if isinstance(asked, AttachedRun):
        return asked
    path = Path(asked)
    try:
        return AttachedRun.model_validate(json.loads(read_text(path, inside=path.parent, what="a run file")))
    except OSError as error:
        raise ConfigError(f"{path}: the run file of {RUN_FILE_VARIABLE} cannot be read: {error}") from error
    except ValidationError as error:
        problems = [f"{key}: {text}" for key, text in validation_problems(error, AttachedRun)]
        raise ConfigError(f"{path} is no run file:{bullet_list(problems, limit=None)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no run file: {error}") from error


def _attach(
    run: AttachedRun,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    ranks: RankGroup,
    *,
    vocab_size: int | None,
    prefix: str,
    started_s: float,
) -> AttachedTraining:
    def read() -> tuple[ObservedModel, dict[str, str]]:
        model = observe_model(chunks, optimizer, vocab_size=vocab_size or run.vocab_size, prefix=prefix)
        found = layout_of(model)
        check_layout(found, run.parallel)
        check_followable(model)
        check_trace_ranks(run.trace, found)
        apply_deterministic_mode(os.environ)
        settings = read_back(os.environ)
        check_took_effect(settings, deterministic=is_deterministic_mode(run.system_envs))
        return model, settings

    model, settings = do_together(ranks, read)
    check_agreement({**settings, "run file": run.model_dump_json()}, ranks)
    files = RunFiles(run, is_writer=ranks.global_rank == 0)
    do_together(ranks, files.begin)
    if run.first_step == run.begins_at:
        apply_start(model, run, ranks)
    if run.order.ordered_reductions:
        OrderedReductions().__enter__()  # for good: a training has no block of ours around it
    statements = gather_statements(model, run.trace, ranks)
    order = follow(model, run.order)
    if order.num_replicas is not None:
        model = replace(model, num_replicas=order.num_replicas)
    return AttachedTraining(
        Attachment(
            run=run,
            model=model,
            order=order,
            ranks=ranks,
            files=files,
            settings=settings,
            statements=statements,
            started_s=started_s,
        )
    )
