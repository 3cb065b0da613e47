"""Starts real models on real ranks: ``python -m tests.megatron.start_worker FOLDER TASK ...``.

A task is ``model/precision/layout``, a baseline of its own weights, or with ``-updated`` behind the layout one whose
optimizer was updated before; or ``TASK<BASELINE``, a run with other weights on every rank that starts as that baseline
did, and ``TASK=BASELINE`` one that starts with the baseline's already. Further tasks are in ``FAULTS``: they plant a
fault in a run of one process. Each writes to ``FOLDER/{task}``, ``<`` and ``=`` as ``_from_`` and ``_as_``: the run's
files, all of its state as a trace in ``state``, and ``facts_{rank}.json``. Nothing is judged here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layouts.training import VOCAB_SIZE
from mock_scheduler.config.instruments import AttachedRun, PerturbationConfig, TraceConfig, TraceKind
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.errors import MockSchedulerError, TraceError
from mock_scheduler.megatron.followable import find_draws
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters, iterate_state_buffers
from mock_scheduler.megatron.partition import main_grad
from mock_scheduler.megatron.probe.state import read_state, updated_tensors
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.megatron.start import apply_start
from mock_scheduler.megatron.start.source import StartSource
from mock_scheduler.megatron.start.state import padding_spec
from mock_scheduler.trace.entries import RowTable, TraceEntry, TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, TraceReader
from mock_scheduler.trace.shards import ShardSpec, cut_shard, whole
from mock_scheduler.trace.start_report import StartKind
from pipelines.megatron.process_of_rank import Runtime, build_layout, join_group, leave_layout, stop_runtime
from pipelines.megatron.trained_model import TrainedModel
from tests.dist.workers.checkpoint_worker import config_of
from tests.rank_traces import save_rank_trace

PERTURBED = PerturbationConfig(seed=5, unit_roundoffs=2.0)
STEP = 2
KINDS: tuple[TraceKind, ...] = ("initial", "weight", "optimizer")


# --- Models -----------------------------------------------------------------------------------------------------------


class Layouts:
    """The layout of this process: made anew only where the next task has another, since leaving one takes a second."""

    def __init__(self) -> None:
        self.parallel: ParallelConfig | None = None
        self.runtime: Runtime | None = None

    def join(self, parallel: ParallelConfig, *, seed: int) -> Runtime:
        """The runtime of a layout."""
        if self.runtime is None or self.parallel != parallel:
            if self.runtime is not None:
                leave_layout()
            self.runtime, self.parallel = build_layout(parallel, seed=seed), parallel
        return self.runtime


LAYOUTS = Layouts()


def build_model(task: str) -> TrainedModel:
    """A trained model in the layout of ``model/precision/layout``, whose vocabulary has padding."""
    name, precision, layout = task.removesuffix("-updated").removesuffix("-moved").split("/")
    config = config_of(name, precision, layout)
    config = config.model_copy(update={"model": config.model.model_copy(update={"make_vocab_size_divisible_by": 8})})
    runtime = LAYOUTS.join(config.parallel, seed=config.seed)
    return TrainedModel(config, runtime, vocab_size=VOCAB_SIZE, head="logits", name="", lr=1e-2)


def values_of(name: str, spec: ShardSpec, *, seed: str) -> torch.Tensor:
    """This rank's cut of values that follow from name and seed alone."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "little")
    return cut_shard(torch.randn(spec.global_shape, generator=torch.Generator().manual_seed(key)), spec)


def local_values(model: ObservedModel, spec: ShardSpec, *, seed: str) -> torch.Tensor:
    """The same with the padding rows of the vocabulary, of their own values."""
    values = values_of(spec.name, spec, seed=seed)
    padding = padding_spec(spec, model)
    return values if padding is None else values + values_of(padding.name, padding, seed=seed)


@torch.no_grad()
def fill(model: TrainedModel, *, seed: str) -> None:
    """Sets parameters, wide copies and buffers to values by name: the same in every layout."""
    observed = model.observed
    for local in iterate_parameters(observed):
        local.parameter.copy_(local_values(observed, local.spec, seed=seed) * 0.1)
    for item in iterate_state_buffers(observed):
        item.buffer.copy_(values_of(item.spec.name, item.spec, seed=seed))
    observed_optimizer: Any = observed.optimizer
    observed_optimizer.reload_model_params()


@torch.no_grad()
def scramble(model: TrainedModel) -> None:
    """Other values on every rank, in wide copies too: even replicas differ."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    for local in iterate_parameters(model.observed):
        tensors = [tensor for _, _, tensor in updated_tensors(local, model.observed.optimizers)]
        for tensor in (local.parameter, *tensors):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for item in iterate_state_buffers(model.observed):
        item.buffer.copy_(torch.randn(item.buffer.shape, generator=generator))


def update(model: TrainedModel, *, seed: str) -> None:
    """One update with gradients by name: moments are no longer 0, and a wide copy is no rounded number."""
    for local in iterate_parameters(model.observed):
        main_grad(local.parameter).copy_(local_values(model.observed, local.spec, seed=seed))
    model.update()


# --- What is written --------------------------------------------------------------------------------------------------


def write_state(model: ObservedModel, folder: Path) -> None:
    """All of a model's state, padding rows included, and every rank's own parameters: replicas must agree."""
    entries = []
    for kind in KINDS:
        for piece in read_state(model, kind):
            entries.append(TraceEntry(update=0, kind=kind, spec=piece.spec, tensor=piece.tensor))
            padding = padding_spec(piece.spec, model)
            if padding is not None:
                placed = replace(padding, flat_range=piece.spec.flat_range)
                entries.append(TraceEntry(update=0, kind=kind, spec=placed, tensor=piece.tensor))
    ranks = model.ranks
    save_rank_trace(
        folder,
        step=0,
        global_rank=ranks.global_rank,
        world_size=ranks.world_size,
        coordinates=ranks.coordinates,
        entries=entries,
    )


def trace_initial(model: ObservedModel, output_dir: Path) -> None:
    """The trace of a baseline, as attach writes it."""
    config = TraceConfig(level="full", kinds=["initial"])
    with StepProbe(model.ranks, output_dir / "trace", step=STEP, config=config) as probe:
        probe.start_step(RowTable(), [], [model])


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Counts the whole tensors that readers hand out, and the most that were alive at once."""
    counts = {"read": 0, "alive": 0}
    alive: list[weakref.ref[torch.Tensor]] = []
    merge = TraceReader.merge

    def counted(self: TraceReader, key: TraceKey, **options: Any) -> MergedTensor:
        merged = merge(self, key, **options)
        alive[:] = [one for one in alive if one() is not None]
        alive.append(weakref.ref(merged.tensor))
        counts["read"] += 1
        counts["alive"] = max(counts["alive"], len(alive))
        return merged

    TraceReader.merge = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        TraceReader.merge = merge  # type: ignore[method-assign]


def folder_of(task: str) -> str:
    """The folder of a task."""
    return task.replace("<", "_from_").replace("=", "_as_")


def run_of(root: Path, task: str) -> AttachedRun:
    """The run file of a task."""
    output_dir = root / folder_of(task)
    output_dir.mkdir(parents=True, exist_ok=True)
    baseline = task.replace("=", "<").partition("<")[2]
    return AttachedRun(
        output_dir=str(output_dir),
        first_step=STEP,
        trace=TraceConfig(level="full"),
        initial_state=str(root / baseline / "trace") if baseline else None,
        perturbation=PERTURBED if "-moved" in task else PerturbationConfig(),
    )


def write_facts(run: AttachedRun, **facts: object) -> None:
    """What one rank found."""
    path = Path(run.output_dir) / f"facts_{dist.get_rank()}.json"
    path.write_text(json.dumps(facts), encoding="utf-8")


def start(run: AttachedRun, model: TrainedModel) -> None:
    """Applies the start, and writes what came of it, an error too."""
    group = TorchRankGroup(model.runtime.device)
    with counted_reads() as counts:
        try:
            report = apply_start(model.observed, run, group)
        except MockSchedulerError as error:
            write_facts(run, error=f"{type(error).__name__}: {error}")
            return
    draws = [find_draws(model.observed)]
    model.transformer_config.hidden_dropout = 0.1
    draws.append(find_draws(model.observed))
    model.transformer_config.hidden_dropout = 0.0
    write_facts(run, sentence=report.describe(), counts=counts, num_set=report.num_set, draws=draws)
    write_state(model.observed, Path(run.output_dir) / "state")


# --- Tasks ------------------------------------------------------------------------------------------------------------


def run_task(root: Path, task: str) -> None:
    """A baseline, or a run that starts as one."""
    run = run_of(root, task)
    own = task.replace("=", "<").partition("<")[0]
    model = build_model(own)
    is_baseline = run.initial_state is None
    if is_baseline or "=" in task:
        fill(model, seed="baseline")
    else:
        scramble(model)
    if own.endswith("-updated"):
        update(model, seed="baseline" if is_baseline or "=" in task else "other")
    start(run, model)
    if is_baseline:
        trace_initial(model.observed, Path(run.output_dir))
    # An update after it shows that the optimizer goes on from what was set.
    update(model, seed="next")
    write_state(model.observed, Path(run.output_dir) / "next")


def _lack_a_name(model: TrainedModel) -> None:
    gpt = next(model.observed.gpts())
    gpt.decoder.layers[1].register_parameter("further", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    gpt.decoder.layers[0].self_attention.q_layernorm = torch.nn.Identity()


def _change_a_shape(model: TrainedModel) -> None:
    norm = next(model.observed.gpts()).decoder.final_layernorm
    norm.weight = torch.nn.Parameter(torch.ones(33), requires_grad=False)


def _leave_a_copy_behind(model: TrainedModel) -> None:
    """The optimizer updates another tensor than the one that hangs on the parameter."""
    gpt: Any = next(model.observed.gpts())
    gpt.decoder.final_layernorm.weight.main_param = gpt.decoder.final_layernorm.weight.detach().float().clone()


def _copy_elsewhere(model: TrainedModel) -> None:
    """Megatron's copy from the wide tensor finds an older one."""
    (optimizer,) = model.observed.optimizers
    plain: Any = optimizer
    plain.fp32_from_float16_groups[0][3] = plain.fp32_from_float16_groups[0][3].clone()


def _keep_foreign_state(model: TrainedModel) -> None:
    (optimizer,) = model.observed.optimizers
    inner = optimizer.optimizer.param_groups[0]["params"][0]
    optimizer.optimizer.state[inner] = {"momentum_buffer": torch.ones_like(inner)}


def _fail_alone(model: TrainedModel) -> None:
    """The last rank cannot read one tensor."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    name = next(iterate_parameters(model.observed)).spec.name
    read = StartSource.read

    def fail(self: StartSource, kind: StartKind, spec: ShardSpec, padding: ShardSpec | None) -> torch.Tensor:
        StartSource.read = read  # type: ignore[method-assign]
        raise TraceError(f"{spec.name} is damaged" if spec.name == name else "another")

    StartSource.read = fail  # type: ignore[method-assign]


def _change_alone(model: TrainedModel) -> None:
    """Only the last stage has another shape."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _change_a_shape(model)


#: Name -> model and layout, baseline, and the change of the model before it starts.
FAULTS: Mapping[str, tuple[str, str, Callable[[TrainedModel], None]]] = {
    "name": ("dense/float32/tp1", "dense/float32/tp1", _lack_a_name),
    "shape": ("dense/float32/tp1", "dense/float32/tp1", _change_a_shape),
    "stale": ("dense/bfloat16/tp1-plain", "dense/bfloat16/tp1-updated", _leave_a_copy_behind),
    "elsewhere": ("dense/bfloat16/tp1-plain", "dense/bfloat16/tp1-updated", _copy_elsewhere),
    "foreign": ("dense/float32/tp1-plain", "dense/float32/tp1", _keep_foreign_state),
    "dtype": ("dense/float32/tp1", "dense/float64/tp1", lambda model: None),
    "wider": ("dense/float64/tp1", "dense/float32/tp1", lambda model: None),
    "model": ("gpt2/float32/tp1", "dense/float32/tp1", lambda model: None),
    "empty": ("dense/float32/tp1", "without-parameters", lambda model: None),
    "lone-read": ("dense/float32/pp2", "dense/float32/tp1", _fail_alone),
    "lone-shape": ("dense/float32/pp2", "dense/float32/tp1", _change_alone),
    "missing": ("dense/float32/tp1", "dense/float32/nowhere", lambda model: None),
}


def plant(root: Path, fault: str) -> None:
    """A run with a fault."""
    task, baseline, change = FAULTS[fault]
    if fault == "empty":
        save_rank_trace(
            root / baseline / "trace",
            step=STEP,
            global_rank=0,
            world_size=1,
            coordinates={},
            entries=[TraceEntry(update=0, kind="gradient", spec=whole("x", (1,)), tensor=torch.ones(1))],
        )
    run = run_of(root, fault).model_copy(update={"initial_state": str(root / baseline / "trace")})
    model = build_model(task)
    scramble(model)
    change(model)
    start(run, model)


def main() -> None:
    """All tasks named on the command line, in order."""
    root, tasks = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    join_group()
    for task in tasks:
        if task in FAULTS:
            plant(root, task)
        else:
            run_task(root, task)
        dist.barrier()
    stop_runtime()


if __name__ == "__main__":
    main()
