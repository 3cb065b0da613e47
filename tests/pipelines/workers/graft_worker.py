"""Grafts a traced step of one process into other layouts: ``-m tests.pipelines.workers.graft_worker FOLDER CASE ...``.

A case of one process writes its trace to ``FOLDER/reference/{case}``. Any other is trained twice, into
``FOLDER/{kind}/{case}``: with other weights in layers 0 to 2 and outputs of its reference put in, and with the
reference's gradients put in, which without that differ by rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import GraftConfig, LedgerKind, TraceConfig, TraceKind
from mock_scheduler.megatron.probe.graft import GraftProbe
from mock_scheduler.megatron.probe.graft_source import GraftSource
from mock_scheduler.megatron.probe.interface import combine
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime

KINDS: list[TraceKind | LedgerKind] = ["activation", "router", "logits", "activation_gradient"]
#: What follows the last graft.
AFTER = ("decoder.final_layernorm",)
_ANY = (
    "embedding",
    "decoder.layers.0.self_attention.linear_qkv",
    "decoder.layers.1.self_attention.core_attention",
    "decoder.layers.2.input_layernorm",
    "decoder.layers.3",
    "output_layer",
)
_DENSE = ("decoder.layers.2.mlp.linear_fc1",)
_EXPERTS = (
    "decoder.layers.1.mlp.router.logits",
    "decoder.layers.1.mlp.shared_experts",
    "decoder.layers.2.mlp.router.logits",
    "decoder.layers.2.mlp.router.probs",
    "decoder.layers.2.mlp.experts",
)


def grafted_names(case: Case) -> tuple[str, ...]:
    """Outputs of every form that the case's model has."""
    return (*_ANY, *(_DENSE if case.model == "dense" else _EXPERTS))


def build_learner(case: Case) -> Learner:
    """The case's learner in a layout of its own."""
    config = build_config(case)
    runtime = build_layout(config.parallel, seed=SEED)
    return Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))


def run_case(root: Path, case: Case) -> None:
    """One case, from the canonical initial weights. Every rank must call it."""
    batch, trace = random_batch(SEED, longest=LONGEST_ROW), TraceConfig(level="full", kinds=KINDS)
    if case == case.reference:
        learner = build_learner(case)
        with StepProbe(learner.runtime, root / "reference" / case.name, step=0, config=trace) as probe:
            learner.train_step(batch, probe=probe)
        return
    trace_dir = str(root / "reference" / case.reference.name)
    for number, kind in enumerate(("activation", "activation_gradient")):
        if number:
            leave_layout()
        learner = build_learner(case)
        if kind == "activation":
            change_weights(learner)
        config = GraftConfig.model_validate({"trace_dir": trace_dir, "kind": kind, "names": grafted_names(case)})
        graft = GraftProbe(learner.runtime, GraftSource(config))
        with StepProbe(learner.runtime, root / kind / case.name, step=0, config=trace) as probe:
            learner.train_step(batch, probe=combine(graft, probe))
    dist.barrier()


def change_weights(learner: Learner) -> None:
    """Make the weights of layers 0 to 2 that compute queries, keys and values 1 % larger, in every layout alike."""
    with torch.no_grad():
        for local in learner.policy.policy.parameters():
            if local.spec.name in {f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(3)}:
                local.parameter.mul_(1.01)


def main() -> None:
    """All cases named on the command line, in order."""
    root, cases = Path(sys.argv[1]), [Case.parse(name) for name in sys.argv[2:]]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    start_runtime(build_config(cases[0]).parallel, seed=SEED)
    leave_layout()
    for case in cases:
        run_case(root, case)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
