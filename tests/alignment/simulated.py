"""Training of two layers in plain torch, of which a run under given overrides writes real traces: for localisation.

Contract: as the pipeline does, a run traces the steps, kinds and names that its overrides say, whole or as sketches,
and puts the tensors of another trace in. Faults are in the candidate alone, from ``first_step`` on. With two ranks all
is whole on both, but that gradients of norms may be parts of a sum. What it learns is of no interest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceEntry, TraceKey, TraceSink
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, cut_shard, whole
from mock_scheduler.trace.sketch.files import SketchSink
from pipelines.config.schema import PipelineConfig
from pipelines.program import PROGRAM

HIDDEN, TOKENS, NUM_LAYERS = 16, 12, 2
ROWS = RowTable(identities=("train/0/a", "train/0/b"), lengths=(5, 7))
NORMS = tuple(f"decoder.layers.{layer}.input_layernorm.weight" for layer in range(NUM_LAYERS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What the candidate computes otherwise. forward, backward: factors of modules' outputs, and of the gradients that
    arrive there. adds: what a module adds to what reaches it. unsummed: norm gradients stay each rank's own part.
    decay: a factor of every parameter behind its update. scores: a factor of the log-probabilities before it.
    same_rows: every rank holds the first row alone."""

    first_step: int = 0
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    unsummed: bool = False
    decay: float = 1.0
    scores: float = 1.0
    same_rows: bool = False


def planned(name: str, folder: Path, *, max_steps: int = 4, **config: Any) -> PlannedRun:
    """A run of one process, as an alignment plans it."""
    return PlannedRun(
        program=PROGRAM,
        name=name,
        entry="pipelines.agentic",
        own_overrides=(),
        overrides=(),
        config=PipelineConfig.model_validate({"exp_name": name, "max_steps": max_steps, **config}),
        output_dir=folder / name,
    )


@dataclass(kw_only=True)
class Runs:
    """Carries runs out, the candidate's with its fault. fails: names of runs that fail. made: all, with overrides."""

    folder: Path
    fault: Fault
    num_ranks: int = 1
    fails: tuple[str, ...] = ()
    made: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, planned: PlannedRun, overrides: Sequence[str], name: str) -> Path:
        """As ``MakeRun`` says."""
        values = {key: yaml.safe_load(text) for key, _, text in (item.partition("=") for item in overrides)}
        assert name not in self.made
        self.made[name] = values
        if any(name.endswith(part) for part in self.fails):
            raise AlignmentError(f"{name} was told to fail")
        is_candidate = planned.name != "baseline"
        training = _Training(
            fault=self.fault if is_candidate else Fault(),
            values=values,
            trace_dir=self.folder / name / "trace",
            num_ranks=self.num_ranks if is_candidate else 1,
        )
        for step in range(values.get("max_steps", planned.config.max_steps)):
            training.step(step)
        return self.folder / name

    def names(self) -> list[str]:
        """The runs in order, without what all names begin with."""
        return [name.removeprefix("localise-candidate-") for name in self.made]


class _Training:
    def __init__(self, *, fault: Fault, values: dict[str, Any], trace_dir: Path, num_ranks: int) -> None:
        self._fault, self._values, self._trace_dir, self._num_ranks = fault, values, trace_dir, num_ranks
        self._has_fault = False
        self._step = 0
        generator = torch.Generator().manual_seed(5)
        self.weights: dict[str, torch.Tensor] = {}
        for layer in range(NUM_LAYERS):
            prefix = f"decoder.layers.{layer}"
            self.weights[f"{prefix}.input_layernorm.weight"] = 1.0 + 0.1 * torch.randn(HIDDEN, generator=generator)
            self.weights[f"{prefix}.mlp.linear_fc1.weight"] = 0.3 * torch.randn(HIDDEN, HIDDEN, generator=generator)
            self.weights[f"{prefix}.mlp.linear_fc2.weight"] = 0.3 * torch.randn(HIDDEN, HIDDEN, generator=generator)
        self.weights["output_layer.weight"] = 0.3 * torch.randn(HIDDEN, HIDDEN, generator=generator)
        self._inputs = torch.randn(TOKENS, HIDDEN, generator=generator)
        self._entries: list[tuple[TraceKind, str, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]] = []

    def step(self, step: int) -> None:
        """One update, traced where that is due."""
        self._entries, self._step = [], step
        self._has_fault = step >= self._fault.first_step
        weights = {name: value.clone().requires_grad_() for name, value in self.weights.items()}
        for name, value in weights.items():
            self._note("initial", name, value)
        with torch.no_grad():
            scores = self._forward(weights, traced=False).log_softmax(dim=1)[:, 0]
        self._note("score", "old_logprobs", scores * (self._fault.scores if self._has_fault else 1.0))
        logprobs = self._forward(weights, traced=True).log_softmax(dim=1)[:, 0]
        self._note("output", "logprobs", logprobs)
        logprobs.square().sum().backward()
        for name, value in weights.items():
            assert value.grad is not None
            self._note("gradient", name, value.grad, self._parts(name, value.grad))
        with torch.no_grad():
            for name, value in weights.items():
                assert value.grad is not None
                parts = self._parts(name, value.grad)
                updated = value - 0.01 * (value.grad if parts is None else parts[0])
                self.weights[name] = (updated * (self._fault.decay if self._has_fault else 1.0)).detach()
                self._note("parameter", name, self.weights[name])
        values = self._values
        if step in StepRanges.parse(values["trace.steps"] if values["trace.steps"] is not None else "0-"):
            self._write()

    def _parts(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What each rank has of a norm's gradient that is not summed; the two add up to it."""
        if not (self._has_fault and self._fault.unsummed and name in NORMS):
            return None
        share = torch.linspace(0.2, 0.9, HIDDEN)
        return gradient * share, gradient - gradient * share

    def _forward(self, weights: dict[str, torch.Tensor], *, traced: bool) -> torch.Tensor:
        hidden = self._give("embedding", self._inputs.clone().requires_grad_() * 1.0, traced)
        for layer in range(NUM_LAYERS):
            prefix = f"decoder.layers.{layer}"
            norm = self._give(f"{prefix}.input_layernorm", hidden * weights[f"{prefix}.input_layernorm.weight"], traced)
            inner = self._give(f"{prefix}.mlp.linear_fc1", norm @ weights[f"{prefix}.mlp.linear_fc1.weight"], traced)
            output = inner.tanh() @ weights[f"{prefix}.mlp.linear_fc2.weight"]
            output = self._give(f"{prefix}.mlp.linear_fc2", output, traced)
            hidden = self._give(prefix, hidden + output, traced)
        return self._give("output_layer", hidden @ weights["output_layer.weight"], traced, kind="logits")

    def _give(self, name: str, output: torch.Tensor, traced: bool, kind: TraceKind = "activation") -> torch.Tensor:
        """A module's output, with faults, then grafts, then the trace: in both passes."""
        factor = self._fault.forward.get(name, 1.0) if self._has_fault else 1.0
        output = output if factor == 1.0 else output * factor
        if not traced:
            return output
        reference = self._grafted(name, kind)
        is_value = self._values.get("graft.kind") == "activation"
        if reference is not None and is_value:
            output = reference + (output - output.detach())
        self._note(kind, name, output)
        back = self._fault.backward.get(name, 1.0) if self._has_fault else 1.0

        def take(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient if back == 1.0 else gradient * back
            gradient = reference if reference is not None and not is_value else gradient
            self._note("activation_gradient", name, gradient)
            return gradient

        output.register_hook(take)
        return output

    def _grafted(self, name: str, kind: TraceKind) -> torch.Tensor | None:
        values = self._values
        if name not in values.get("graft.names", ()) or values["graft.step"] != self._step:
            return None
        kind = kind if values["graft.kind"] == "activation" else "activation_gradient"
        with open_trace(Path(values["graft.trace_dir"])) as trace:
            return trace.merge(TraceKey(step=self._step, update=0, kind=kind, name=name)).tensor.clone()

    def _note(
        self,
        kind: TraceKind,
        name: str,
        tensor: torch.Tensor,
        parts: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._entries.append((kind, name, tensor.detach().clone(), parts))

    def _write(self) -> None:
        values, has_same_rows = self._values, self._has_fault and self._fault.same_rows
        for rank in range(self._num_ranks):
            place = RankPlace(global_rank=rank, coordinates={"dp" if has_same_rows else "tp": rank})
            make = SketchSink if values["trace.level"] == "sketch" else FullSink
            sink: TraceSink = make(self._trace_dir, step=self._step, place=place, world_size=self._num_ranks)
            for kind, name, tensor, parts in self._entries:
                if kind in values["trace.kinds"] and any(fnmatchcase(name, glob) for glob in values["trace.patterns"]):
                    own = tensor if parts is None else parts[rank]
                    dims = _dims(kind, own)
                    spec = whole(name, tuple(own.shape))
                    if has_same_rows and dims:
                        spec = _first_row(spec)
                    sink.add(TraceEntry(update=0, kind=kind, spec=spec, tensor=cut_shard(own, spec), dims=dims))
            sink.close(
                StepFooter(
                    rows=ROWS,
                    update_rows=((0, 1),),
                    ranks=tuple(range(self._num_ranks)),
                    kinds=tuple(values["trace.kinds"]),
                    patterns=tuple(values["trace.patterns"]),
                )
            )


def _first_row(spec: ShardSpec) -> ShardSpec:
    """The tokens of the first row."""
    num_tokens = ROWS.lengths[0]
    return ShardSpec(
        name=spec.name,
        global_shape=spec.global_shape,
        local_shape=(num_tokens, *spec.global_shape[1:]),
        splits=(Split(dim=0, blocks=blocks_of_indices(range(num_tokens))),),
    )


def _dims(kind: TraceKind, tensor: torch.Tensor) -> tuple[DimName, ...]:
    if kind in ("initial", "gradient", "parameter"):
        return ()
    dims: tuple[DimName, ...] = ("token", "channel")
    return dims[: tensor.dim()]
