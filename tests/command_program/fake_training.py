"""A training in plain torch that no instrument knows: it reads the run file and writes the files of an attached run.

``python fake_training.py --layout tp2 --lr 0.1 [--layers 2] [--dtype float64] [--fault NAME]``. Its layouts differ as
real ones do: its first weights depend on the layout, tp cuts a sum in two, and dp adds the gradients of two rows in
another order. Faults: ``scale`` (tp's second part is scaled), ``decay``, ``crash``, ``refuse``, ``hang``, ``detached``,
``short``, ``other_layout``, ``kill``, ``unseeded`` (it draws), ``torn`` (ranks disagree), ``hidden`` (it says that a
module's output is not shown).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, AttachedRun, TraceKind
from mock_scheduler.config.layout import ParallelConfig, parse_layout
from mock_scheduler.config.loading import dump_config
from mock_scheduler.determinism.operations import OperationLogHeader
from mock_scheduler.determinism.operations.recorder import record_operations
from mock_scheduler.support.loaded_code import save_loaded_code
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceEntry, TraceKey, TraceSink
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.trace.start_report import KindOfStart, StartDifference, StartReport, save_start

HIDDEN, TOKENS = 16, 12
ROWS = RowTable(identities=("a", "b"), lengths=(5, 7))
UNOBSERVED = {"decoder.layers.1.mlp.linear_fc1": "a Gate stands at no place whose output is known"}
TOKEN_DIMS: tuple[DimName, DimName] = ("token", "channel")


class FakeTraining:
    """Some linear layers, trained on two rows of fixed inputs."""

    def __init__(self, run: AttachedRun, *, layout: ParallelConfig, lr: float, layers: int, fault: str) -> None:
        self.run, self.lr, self.fault = run, lr, fault
        # The order to add in is the layout's own, or the followed one.
        order = run.order.emulate or layout
        self.num_parts, self.num_replicas = order.tensor_model_parallel_size, order.data_parallel_size
        self.dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[run.precision]
        self.is_tp2 = layout.tensor_model_parallel_size == 2
        generator = torch.Generator().manual_seed(7 + layout.world_size)
        self.names = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(layers)]
        self.weights = {
            f"{name}.weight": 0.3 * torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
            for name in self.names
        }
        self.weights = {name: value.to(self.dtype) for name, value in self.weights.items()}
        self.inputs = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(self.dtype)
        self.entries: list[tuple[TraceKind, str, torch.Tensor]] = []
        self.is_torn = False

    def begin(self) -> None:
        """Takes the initial state that is asked for, and perturbs it."""
        if self.run.initial_state is not None:
            own = dict(self.weights)
            with open_trace(Path(self.run.initial_state)) as trace:
                for name in self.weights:
                    key = TraceKey(step=self.run.first_step, update=0, kind="initial", name=name)
                    self.weights[name] = trace.merge(key).tensor.to(self.dtype)
            changed = [name for name, value in own.items() if not torch.equal(value, self.weights[name])]
            first = tuple(StartDifference(name=name, relative=1.5) for name in changed[:1])
            kind = KindOfStart(num_equal=len(own) - len(changed), num_set=len(changed), first=first)
            report = StartReport(step=0, num_updates=0, source=self.run.initial_state, kinds={"initial": kind})
            save_start(Path(self.run.output_dir), report)
        if self.run.perturbation.seed is not None:
            generator = torch.Generator().manual_seed(self.run.perturbation.seed)
            for name, value in self.weights.items():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                factor = 1.0 + UNIT_ROUNDOFFS[self.run.precision] * noise
                self.weights[name] = (value.double() * factor).to(self.dtype)

    def step(self, step: int) -> dict[str, float]:
        """One update; returns its metrics."""
        self.entries = []
        for name, value in self.weights.items():
            self._note("initial", name, value)
        rows = torch.split(self.inputs, list(ROWS.lengths))
        groups = [self.inputs] if self.num_replicas == 1 else list(rows)
        gradients: dict[str, torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for group in groups:
            weights = {name: value.clone().requires_grad_() for name, value in self.weights.items()}
            output = self._forward(group, weights, step)
            output.square().sum().backward()
            outputs.append(output.detach())
            for name, value in weights.items():
                assert value.grad is not None
                gradients[name] = value.grad if name not in gradients else gradients[name] + value.grad
        for kind, name in {(kind, name): None for kind, name, _ in self.entries if kind == "activation"}:
            parts = [tensor for own, other, tensor in self.entries if (own, other) == (kind, name)]
            self.entries = [item for item in self.entries if item[:2] != (kind, name)]
            self._note(kind, name, torch.cat(parts))
        for name, gradient in gradients.items():
            self._note("gradient", name, gradient)
            factor = 1.01 if self.fault == "decay" else 1.0
            self.weights[name] = (self.weights[name] - self.lr * gradient * factor).detach()
            self._note("parameter", name, self.weights[name])
        loss = torch.cat(outputs).double().square().sum()
        return {"loss": float(loss), "grad_norm": float(sum(g.double().square().sum() for g in gradients.values()))}

    def _forward(self, hidden: torch.Tensor, weights: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        for name in self.names:
            weight = weights[f"{name}.weight"]
            if self.num_parts == 1:
                output = hidden @ weight
            else:
                pieces = zip(hidden.chunk(self.num_parts, dim=1), weight.chunk(self.num_parts, dim=0), strict=True)
                parts = [piece @ part for piece, part in pieces]
                if self.fault == "scale" and self.is_tp2:
                    parts[1] = parts[1] * 1.02
                output = sum(parts[1:], parts[0])
            if self.fault == "unseeded":
                output = output + torch.rand(1, dtype=output.dtype)
            if self.fault == "torn":
                self.is_torn = True
            output = self._graft(name, output, step)
            self._note("activation", name, output)
            hidden = output.tanh()
        return hidden

    def _graft(self, name: str, output: torch.Tensor, step: int) -> torch.Tensor:
        graft = self.run.graft
        if name not in graft.names or graft.step != step or graft.trace_dir is None or graft.kind != "activation":
            return output
        with open_trace(Path(graft.trace_dir)) as trace:
            reference = trace.merge(TraceKey(step=step, update=0, kind="activation", name=name)).tensor.clone()
        if reference.shape != output.shape:
            return output
        return reference.to(output.dtype) + (output - output.detach())

    def _note(self, kind: TraceKind, name: str, tensor: torch.Tensor) -> None:
        self.entries.append((kind, name, tensor.detach().clone()))

    def write_trace(self, step: int, world_size: int) -> None:
        """Writes the selected tensors, whole on every rank."""
        trace = self.run.trace
        if not trace.is_due(step):
            return
        for rank in range(world_size):
            make = SketchSink if trace.level == "sketch" else FullSink
            place = RankPlace(global_rank=rank, coordinates={"tp": rank})
            folder = Path(self.run.output_dir) / "trace"
            sink: TraceSink = make(folder, step=step, place=place, world_size=world_size)
            for kind, name, tensor in self.entries:
                if rank and self.is_torn and kind == "parameter":
                    tensor = tensor + 1.0
                if kind in trace.kinds and any(fnmatchcase(name, glob) for glob in trace.patterns):
                    dims = TOKEN_DIMS if kind == "activation" else ()
                    spec = whole(name, tuple(tensor.shape))
                    sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=tensor, dims=dims))
            sink.close(
                StepFooter(
                    rows=ROWS,
                    update_rows=((0, 1),),
                    ranks=tuple(range(world_size)),
                    kinds=tuple(trace.kinds),
                    patterns=tuple(trace.patterns),
                )
            )


def train(run: AttachedRun, arguments: argparse.Namespace) -> int:
    """Trains as an attached training does, and writes its files."""
    layout = ParallelConfig.model_validate(parse_layout(arguments.layout))
    fault, folder = arguments.fault, Path(run.output_dir)
    if fault == "detached":
        return 0
    if fault == "crash":
        print("ValueError: the optimizer has no such group")
        return 2
    if fault == "hang":
        time.sleep(600.0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if run.order.emulate is not None and (limits := list(find_order_limits(run.order.emulate))):
        return refuse(folder, f"the order of dp2 cannot be followed: {limits[0]}")
    if fault == "refuse":
        return refuse(folder, "CUDA graphs replay what no hook sees; turn them off")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(run), encoding="utf-8")
    training = FakeTraining(run, layout=layout, lr=arguments.lr, layers=arguments.layers, fault=fault)
    training.begin()
    assert run.last_step is not None
    num_steps = 1 if fault == "short" else run.last_step + 1
    lines = list(_train_steps(training, num_steps, layout.world_size))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    told = ParallelConfig(tensor_model_parallel_size=4) if fault == "other_layout" else layout
    content = {
        "status": "completed",
        "layout": told.describe(),
        "wall_s": 0.5,
        "rollout_s": 0.0,
        "train_s": 0.5,
        "batches": {str(step): "0" * 64 for step in range(num_steps)},
        "settings": {},
        "unobserved_modules": UNOBSERVED if fault == "hidden" else {},
        "untraced_parameters": {},
        "order_limits": list(find_order_limits(layout)),
        "not_followed": [] if run.order.emulate is None else ["the loss function's own sums"],
        "packages": {"torch": torch.__version__},
    }
    (folder / "ledger.json").write_text(json.dumps({"built": {"engine": 0, "environment": 0}}), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    save_loaded_code(folder)
    return 0


def _record(training: FakeTraining, step: int) -> dict[str, float]:
    """One update, with a log of its operations."""
    header = OperationLogHeader(step=step, global_rank=0, world_size=1, settings={"OMP_NUM_THREADS": "1"})
    with record_operations(Path(training.run.output_dir), header, modules={}):
        return training.step(step)


def find_order_limits(layout: ParallelConfig) -> Iterator[str]:
    """Says what keeps one process from following a layout, as an attached run does."""
    if layout.data_parallel_size > 1:
        yield "the loss function adds by itself"


def _train_steps(training: FakeTraining, num_steps: int, world_size: int) -> Iterator[str]:
    for step in range(num_steps):
        metrics = _record(training, step) if training.run.trace.operations else training.step(step)
        training.write_trace(step, world_size)
        yield json.dumps({"step": step, "metrics": metrics}) + "\n"


def refuse(folder: Path, message: str) -> int:
    """Writes a refusal as attach does."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"type": "UnsupportedModelError", "message": message, "exit_code": 5, "global_rank": 0}
    (folder / "error.json").write_text(json.dumps(content), encoding="utf-8")
    return 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="tp1")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fault", default="")
    parser.add_argument("--num-processes", default="1")
    return parser.parse_args(arguments)


def main() -> int:
    """Reads the run file that the environment names."""
    text = Path(os.environ["MOCK_SCHEDULER_RUN"]).read_text(encoding="utf-8")
    return train(AttachedRun.model_validate_json(text), parse(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
