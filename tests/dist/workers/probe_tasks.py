"""Steps with a probe, which ``trace_worker`` runs for a test.

A task is one of these; ``FOLDER/{task}`` gets what it writes, and nothing is judged here.

- ``values/OPTION``: one step in one process, with a critic, two updates and two epochs; its trace, and in
  ``facts.json`` what the learner computed, by row and position.
- ``layout/LAYOUT``: one step with a ledger; its trace.
- ``unchanged/PRECISION``: digests of all that a step leaves, by how it is traced, in ``digests.json``.
- ``operations``: every operation of a step that is not traced, in ``operations.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import TraceConfig
from benchmarks.layouts.training import NUM_ACTIONS
from benchmarks.layouts.training import VOCAB_SIZE
from benchmarks.layouts.training import random_batch
from mock_scheduler.config.instruments import LedgerKind, TraceConfig, TraceKind
from mock_scheduler.support.tensor_bytes import as_bytes
from pipelines.algorithm.losses import PolicyLossConfig, PolicyLossInputs, PolicyLossOutput, compute_policy_loss
from pipelines.config.schema import PipelineConfig
from pipelines.megatron import trainer
from pipelines.megatron.learner import Learner, Scores
from pipelines.megatron.places import OwnBatch
from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.process_of_rank import build_layout, leave_layout

STEP_PROBE_KINDS: tuple[TraceKind | LedgerKind, ...] = (
    *("initial", "input", "score", "advantage", "output", "loss", "gradient", "gradient_norm", "optimizer"),
    *("parameter", "weight", "random", "collective"),
)
ALL_KINDS = TraceConfig(level="full", kinds="all")  # type: ignore[arg-type]
OF_STEP_PROBE = TraceConfig(level="full", kinds=list(STEP_PROBE_KINDS))
# What a step may be traced as, by a name of it.
WAYS: dict[str, TraceConfig | None] = {
    "no probe": None,
    "full": ALL_KINDS,
    "sketch": ALL_KINDS.model_copy(update={"level": "sketch"}),
}
ANOTHER_RANK = ALL_KINDS.model_copy(update={"ranks": [7]})

Facts = dict[str, dict[str, float]]


def config_of(case: Case, **values: Any) -> PipelineConfig:  # noqa: ANN401 - keys of a configuration
    """A run of the case with two layers, and an epsilon that keeps rounding of tiny gradients small in parameters."""
    plain = build_config(case).model_dump()
    plain["model"]["num_layers"] = 2
    plain["training"]["adam_eps"] = 1e-5
    return PipelineConfig.model_validate({**plain, **values})


def build_learner(config: PipelineConfig) -> Learner:
    """The learner in a layout that is made anew in the process group."""
    runtime = build_layout(config.parallel, seed=SEED)
    return Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))


def train(learner: Learner, folder: Path, config: TraceConfig | None) -> dict[str, float]:
    """The first step, traced as this says."""
    batch = random_batch(SEED, longest=LONGEST_ROW)
    if config is None:
        return learner.train_step(batch, probe=NO_PROBE)
    with StepProbe(learner.runtime, folder, step=0, config=config) as probe:
        return learner.train_step(batch, probe=probe)


def write_values(folder: Path, option: str) -> None:
    """The trace and the facts of one way to make micro-batches."""
    case = Case(model="dense", precision="float64", option=f"critic+{option}")
    learner = build_learner(config_of(case, ppo_epochs=2))
    facts = note_facts(learner)
    metrics = train(learner, folder, OF_STEP_PROBE)
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


def note_facts(learner: Learner) -> Facts:
    """Scores, advantages and loss terms as they will be computed: ``{kind}/{name}/{update}`` by ``row,position``."""
    facts: Facts = {}
    score, update, compute = learner._score, learner.policy.update, compute_policy_loss
    waiting: list[OwnBatch] = []
    numbers: list[int] = []

    def noted_score(batches: Sequence[OwnBatch]) -> Scores:
        scores = score(batches)
        for own in batches:
            for name, values in scores.of(own.batch.index).items():
                _note(facts, f"score/{name}/0", own, values)
        return scores

    def noted_update(micro_batches: Any, batches: Any, *others: Any, number: int, **named: Any) -> Any:  # noqa: ANN401
        waiting[:], numbers[:] = batches, [number]
        return update(micro_batches, batches, *others, number=number, **named)

    def noted_loss(inputs: PolicyLossInputs, config: PolicyLossConfig) -> PolicyLossOutput:
        output, own = compute(inputs, config), waiting.pop(0)
        _note(facts, "advantage/advantages/0", own, inputs.advantages)
        _note(facts, f"output/logprobs/{numbers[0]}", own, inputs.new_logprobs)
        for name, values in output.terms.items():
            _note(facts, f"loss/{name}/{numbers[0]}", own, values)
        return output

    learner._score = noted_score  # type: ignore[method-assign]
    learner.policy.update = noted_update  # type: ignore[method-assign]
    trainer.compute_policy_loss = noted_loss  # type: ignore[attr-defined]
    return facts


def _note(facts: Facts, name: str, own: OwnBatch, values: torch.Tensor) -> None:
    table, batch = facts.setdefault(name, {}), own.batch
    for line, column in batch.response_mask.nonzero().tolist():
        place = f"{int(batch.row_ids[line, column])},{int(batch.positions[line, column])}"
        table[place] = float(values[line, column])


def write_layout(folder: Path, layout: str) -> None:
    """One update with every kind of state and both ledgers."""
    case = Case(model="dense", precision="float64", layout=layout, option="one-update")
    train(build_learner(config_of(case)), folder, OF_STEP_PROBE)


def write_digests(folder: Path, precision: str) -> None:
    """What a step leaves behind, by how it is traced."""
    digests = {}
    for name, trace in WAYS.items():
        learner = build_learner(config_of(Case(model="dense", precision=precision, option="one-update+micro-batch-4")))
        metrics = train(learner, folder / name.replace(" ", "_"), trace)
        digests[name] = {"metrics": json.dumps(metrics, sort_keys=True), **_state_digests(learner)}
        leave_layout()
    (folder / "digests.json").write_text(json.dumps(digests), encoding="utf-8")


def _state_digests(learner: Learner) -> dict[str, str]:
    model = learner.policy.policy
    tensors: dict[str, Any] = {"random state": torch.get_rng_state()}
    for local in model.parameters():
        parameter: Any = local.parameter  # Megatron gives it a gradient of its own
        tensors |= {local.spec.name: parameter, f"gradient of {local.spec.name}": parameter.main_grad}
    for index, optimizer in enumerate(model.observed.optimizers):
        for group in optimizer.optimizer.param_groups:
            for place, inner in enumerate(group["params"]):
                state = {name: value for name, value in optimizer.optimizer.state[inner].items() if name != "step"}
                tensors |= {f"{index}.{place}.{name}": value for name, value in {**state, "inner": inner}.items()}
    return {
        name: hashlib.sha256(as_bytes(tensor.detach()).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


class _Operations(TorchDispatchMode):
    """The names of all that is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _OnlyCalls(TrainingProbe):
    """Counts the operations that are dispatched while a probe that does nothing is called."""

    def __init__(self, mode: _Operations) -> None:
        self.num_calls = self.num_operations = 0
        self._mode = mode

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
        found = super().__getattribute__(name)
        if name not in vars(TrainingProbe) or name.startswith("_"):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            before = len(self._mode.names)
            result = found(*args, **kwargs)
            self.num_calls += 1
            self.num_operations += len(self._mode.names) - before
            return result

        return counted


def write_operations(folder: Path) -> None:
    """Operations of a step without a trace, with a probe that counts, and on a rank that writes nothing."""
    found: dict[str, Any] = {}

    def watch(name: str, step: Callable[[Learner, _Operations], object]) -> None:
        learner = build_learner(config_of(Case(model="dense", precision="float32", option="one-update+micro-batch-4")))
        with _Operations() as mode:
            step(learner, mode)
        found[name] = mode.names
        leave_layout()

    def counted(learner: Learner, mode: _Operations) -> None:
        probe = _OnlyCalls(mode)
        learner.train_step(random_batch(SEED, longest=LONGEST_ROW), probe=probe)
        found["calls"], found["operations of calls"] = probe.num_calls, probe.num_operations

    watch("no probe", lambda learner, mode: train(learner, folder, None))
    watch("counted", counted)
    watch("another rank", lambda learner, mode: train(learner, folder, ANOTHER_RANK))
    watch("full", lambda learner, mode: train(learner, folder, ALL_KINDS))
    (folder / "operations.json").write_text(json.dumps(found), encoding="utf-8")


_TASKS: dict[str, Callable[..., None]] = {
    "values": write_values,
    "layout": write_layout,
    "unchanged": write_digests,
    "operations": write_operations,
}


def run_task(root: Path, task: str) -> None:
    """One task, with no layout there. Every rank must call it."""
    kind, *rest = task.split("/")
    folder = root / task
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _TASKS[kind](folder, *rest)
    finally:
        trainer.compute_policy_loss = compute_policy_loss  # type: ignore[attr-defined]
