"""What the ranks of a checkpoint test run: ``-m tests.dist.workers.checkpoint_worker FOLDER TASK ...``.

A task is ``model/precision/layout``: train a step, save a checkpoint, train another step; or, with a second layout
behind it as in ``dense/float64/tp2-sp-pp2>dp4``: a model with other parameters loads that checkpoint and trains the
other step. Either writes to ``FOLDER/{task}`` what its parameters, buffers and optimizers hold at the checkpoint
(``state``), the other step's metrics and trace (``next``) and what it counts (``facts_{rank}.json``); who loads also
writes what a perturbed model holds (``moved``), and what a model holds that loads the same checkpoint as releases
before seals wrote it (``old``). Nothing is judged here; the test compares the files.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from benchmarks.layouts.cases import parallel_of
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from benchmarks.layouts.cases import GROUP_SIZE
from benchmarks.layouts.cases import NUM_GROUPS
from mock_scheduler.config.instruments import PerturbationConfig
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.trace.entries import TraceEntry
from tests.dist.old_checkpoint import save_old_checkpoint
from tests.rank_traces import save_rank_trace
from mock_scheduler.trace.names import canonical_parameter_name
from mock_scheduler.trace.shards import ShardSpec, whole
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.run_state import RunState, check_contents, check_files, fixed_settings, read_run_state
from pipelines.megatron.checkpoint import load_checkpoint, save_checkpoint
from pipelines.megatron.learner import Learner
from mock_scheduler.megatron.perturbation import Perturbation
from mock_scheduler.megatron.probe.state import owned_range
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.process_of_rank import Runtime, build_layout, leave_layout, start_runtime, stop_runtime
from pipelines.megatron.trained_model import TrainedModel
from mock_scheduler.megatron.parameters import LocalParameter, layer_offset

SEED = 42
LONGEST_ROW = 56
METRICS_FILE = "metrics.json"
PERTURBATION = Perturbation(seed=3, unit_roundoffs=2.0)

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "qk_layernorm": True,
    "rotary_base": 100,
    "init_method_std": 0.08,
    "vocab_size": VOCAB_SIZE,
    "untie_embeddings_and_output_weights": False,
}
MOE: dict[str, Any] = {
    **DENSE,
    "untie_embeddings_and_output_weights": True,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
# Experts in the last two of four layers: of two stages one has none, and one optimizer less.
LATE_EXPERTS = {**MOE, "moe_layer_freq": [0, 0, 1, 1]}
GPT2: dict[str, Any] = {
    **{name: DENSE[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")},
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding_type": "learned_absolute",
    "init_method_std": 0.08,
}
GAE = {"adv_estimator": "gae", "use_kl_loss": False, "critic": {"lr": 1e-3}}
WARMUP = {**GAE, "critic": {"lr": 1e-3, "warmup_steps": 1}}
ADAPTIVE_KL = {"use_kl_loss": False, "kl_in_reward": {"coef": 0.1, "target": 1e-4, "horizon": 100}}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE},
    "moe": {"model": MOE},
    "late-experts": {"model": LATE_EXPERTS},
    "gpt2": {"model": GPT2},
    "critic": {"model": DENSE, **GAE},
    "critic-warmup": {"model": DENSE, **WARMUP},
    "adaptive-kl": {"model": DENSE, **ADAPTIVE_KL},
}
# A rate that changes with every update shows a schedule that is off by one. Adam turns rounding in a gradient that is
# 0, as that of a key's bias, into an update of up to lr / eps times as much.
TRAINING = {
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-3,
    "adam_eps": 1e-5,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "lr_decay_iters": 20,
    "weight_decay": 0.1,
    "clip_grad": 0.3,
}


def config_of(name: str, precision: str, layout: str) -> PipelineConfig:
    """The run of a case: two updates per step, on 16 rows."""
    num_rows = NUM_GROUPS * GROUP_SIZE
    groups = {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    values = {
        "exp_name": "checkpoints",
        "seed": SEED,
        "max_steps": 2,
        "rollout_batch_size": num_rows,
        "val_batch_size": num_rows,
        "sequence_length": 64,
        "precision": precision,
        "use_kl_loss": True,
        "parallel": parallel_of(layout),
        "training": {**TRAINING, "use_distributed_optimizer": "plain" not in layout.split("-")},
        "actor_infer": {"only_action_tokens": True},
        "train_env_manager": groups,
        "val_env_manager": groups,
    }
    return PipelineConfig.model_validate({**values, **CASES[name]})


def build_learner(config: PipelineConfig, runtime: Runtime | None = None) -> Learner:
    """The learner; ``runtime``: ``None`` is its layout, made anew in the process group."""
    runtime = runtime or build_layout(config.parallel, seed=config.seed)
    return Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))


def train(learner: Learner, step: int, folder: Path) -> None:
    """One step with its trace and metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = StepProbe(learner.runtime, folder, step=step, config=TraceConfig(level="full"))
    metrics = learner.train_step(random_batch(SEED + step, longest=LONGEST_ROW), step=step, probe=probe)
    probe.save()
    if learner.runtime.is_writer:
        (folder / METRICS_FILE).write_text(json.dumps([metrics]), encoding="utf-8")


def write_state(learner: Learner, folder: Path) -> None:
    """Everything that a checkpoint holds as a trace: update 0 is the parameter or buffer, 1 and 2 are Adam's moments,
    3 the wide copy of a bfloat16 parameter.
    """
    runtime = learner.runtime
    entries: list[TraceEntry] = []
    for model in learner.models.values():
        for local in model.parameters():
            entries += [_entry(0, local.spec, local.parameter), *_moments(model, local)]
        entries += [_entry(0, spec, buffer) for spec, buffer in _expert_biases(model, runtime)]
    save_rank_trace(
        folder,
        step=0,
        global_rank=runtime.global_rank,
        world_size=runtime.world_size,
        coordinates=runtime.coordinates,
        entries=entries,
    )


def _entry(update: int, spec: ShardSpec, tensor: torch.Tensor) -> TraceEntry:
    return TraceEntry(update=update, kind="parameter", spec=spec, tensor=tensor.detach().to("cpu", copy=True))


def _moments(model: TrainedModel, local: LocalParameter) -> Iterator[TraceEntry]:
    """Of the part that this rank owns; zeros before the first update."""
    for optimizer in model.observed.optimizers:
        spec = local.spec
        if isinstance(optimizer, DistributedOptimizer):
            owned = owned_range(optimizer, local)
            if owned is None:
                continue
            spec = owned
            group, position = optimizer.model_param_group_index_map[local.parameter]
            inner = optimizer.optimizer.param_groups[group]["params"][position]
        else:
            parameter: Any = local.parameter
            inner = parameter.main_param if parameter.dtype is torch.bfloat16 else parameter
            if not any(inner is one for group in optimizer.optimizer.param_groups for one in group["params"]):
                continue
            spec = replace(spec, flat_range=(0, inner.numel()))
        state = optimizer.optimizer.state.get(inner) or {}
        for update, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
            yield _entry(update, spec, state.get(name, torch.zeros_like(inner)).flatten())
        if local.parameter.dtype is torch.bfloat16:
            yield _entry(3, spec, inner.flatten())


def _expert_biases(model: TrainedModel, runtime: Runtime) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    for gpt in model.observed.gpts():
        offset = layer_offset(gpt)
        for name, buffer in gpt.named_buffers():
            if name.endswith("expert_bias"):
                yield whole(canonical_parameter_name(name, layer_offset=offset), tuple(buffer.shape)), buffer


def disturb(learner: Learner) -> None:
    """Other parameters and expert biases than any run has, and other random states."""
    with torch.no_grad():
        for model in learner.models.values():
            for chunk in model.chunks:
                for tensor in chunk.state_dict().values():
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        tensor.add_(1.0)
    torch.manual_seed(99)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: torch.get_rng_state() for name in tracker.get_states()})


def random_digest() -> str:
    """Of torch's state and all of the tracker's."""
    tracked = get_cuda_rng_tracker().get_states()
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name in sorted(tracked):
        digest.update(name.encode() + tracked[name].numpy().tobytes())
    return digest.hexdigest()


def write_facts(folder: Path, learner: Learner, **further: object) -> None:
    """What one rank counts."""
    facts = {
        "lr_steps": {name: model.lr_schedule.num_steps for name, model in learner.models.items()},
        "learner": learner.state_dict(),
        "random": random_digest(),
        **further,
    }
    (folder / f"facts_{dist.get_rank()}.json").write_text(json.dumps(facts), encoding="utf-8")


def save_case(root: Path, task: str) -> None:
    """Train, save, go on."""
    folder = root / task
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(*task.split("/"))
    learner = build_learner(config)
    learner.train_step(random_batch(SEED, longest=LONGEST_ROW))
    torch.manual_seed(17)  # a state that no start of a run has
    write_state(learner, folder / "state")
    state = RunState(
        next_step=1,
        mode="real",
        fixed=fixed_settings(config, vocab_size=VOCAB_SIZE),
        scheduler={"policy_version": 1},
        learner=learner.state_dict(),
    )
    save_checkpoint(folder / "checkpoint", learner, state)
    save_old_checkpoint(folder / "old-checkpoint", learner, state)
    write_facts(folder, learner)
    train(learner, 1, folder / "next")


def load_case(root: Path, task: str) -> None:
    """Load into another model, go on."""
    folder = root / task
    source, layout = task.split(">")
    name, precision, _ = source.split("/")
    config = config_of(name, precision, layout)
    learner = build_learner(config)
    disturb(learner)
    before = random_digest()
    checkpoint = root / source / "checkpoint"
    load(checkpoint, learner)
    folder.mkdir(parents=True, exist_ok=True)
    write_state(learner, folder / "state")
    write_facts(folder, learner, random_before=before)
    train(learner, 1, folder / "next")
    perturbation = PerturbationConfig(seed=PERTURBATION.seed, unit_roundoffs=PERTURBATION.unit_roundoffs)
    moved = build_learner(config.model_copy(update={"perturbation": perturbation}), learner.runtime)
    load(checkpoint, moved)
    write_state(moved, folder / "moved")
    old = build_learner(config, learner.runtime)
    disturb(old)
    load(root / source / "old-checkpoint", old)
    write_state(old, folder / "old")
    write_facts(folder / "old", old)


def load(checkpoint: Path, learner: Learner) -> None:
    """Check a checkpoint and load it."""
    state = read_run_state(checkpoint)
    check_files(checkpoint, state)
    check_contents(checkpoint, state, TorchRankGroup(learner.runtime.device))
    load_checkpoint(checkpoint, learner, state)


def main() -> None:
    """All tasks named on the command line, in order."""
    root, tasks = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    first = tasks[0].split("/")
    start_runtime(config_of(first[0], first[1], first[2].split(">")[-1]).parallel, seed=SEED)
    leave_layout()
    for task in tasks:
        (load_case if ">" in task else save_case)(root, task)
        dist.barrier()
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
