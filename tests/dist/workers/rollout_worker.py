"""What the ranks of a rollout test run: ``-m tests.dist.workers.rollout_worker FOLDER LAYOUT ...`` under any launcher.

A layout is written as in ``pp2-vpp2-dp2``. For each, and for each model that it can run, every rank plays one batch and
writes its digest to ``FOLDER/{layout}/{model}``; rank 0 writes the batch too. Nothing is judged here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.layout import ParallelConfig
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.step.step_file import encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import Mode, RolloutRequest
from pipelines.environments.registry import build_tokenizer
from pipelines.batching.placement import place_step
from pipelines.megatron.layers.routing import RoutingTable
from pipelines.megatron.places import own_batch
from pipelines.megatron.process_of_rank import Runtime, build_layout, leave_layout, start_runtime, stop_runtime
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.cached_policy import FIRST_WORDS, ForwardPass, ReplicaChannel
from pipelines.rollout.scheduler import AgenticRolloutScheduler

ONE_RANK = "tp1"
SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "init_method_std": 0.08}
MODELS = {
    "rope": ModelConfig(
        **SMALL,
        num_query_groups=2,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=False,
        rotary_base=100,
        make_vocab_size_divisible_by=16,
    ),
    "learned": ModelConfig(
        **SMALL,
        normalization="LayerNorm",
        swiglu=False,
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
    ),
    "experts": ModelConfig(**SMALL, num_moe_experts=4, moe_ffn_hidden_size=32, rotary_base=100),
}
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def parse_layout(text: str) -> ParallelConfig:
    """``tp2-pp2-sp`` as a configuration."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", text)}
    degrees: dict[str, Any] = {_AXES[axis]: size for axis, size in sizes.items()}
    return ParallelConfig(**degrees, sequence_parallel=text.endswith("-sp"))


def models_of(layout: str) -> list[str]:
    """The models that a layout plays: that with experts where these are split, and learned positions in two others."""
    if layout == ONE_RANK:
        return list(MODELS)
    if "ep" in layout:
        return ["experts"]
    if layout == "pp2-vpp2-dp2":
        return ["rope", "learned", "experts"]
    return ["rope", "learned"] if layout == "tp2-pp2" else ["rope"]


def rollout_config(model: ModelConfig, parallel: ParallelConfig, **overrides: Any) -> PipelineConfig:
    """Four groups of three episodes, in blocks of four rows: blocks cut groups, and three do not divide over dp."""
    values: dict[str, Any] = {
        "exp_name": "rollout",
        "rollout_batch_size": 12,
        "val_batch_size": 12,
        "sequence_length": 64,
        "model": model.model_dump(exclude_unset=True),
        "parallel": parallel.model_dump(exclude_unset=True),
        "training": {"micro_batch_size": 1, "global_batch_size": 12, "sequence_multiple_of": 8},
        "actor_infer": {"max_new_tokens": 2, "rows_per_forward": 4, "generating_args": {"temperature": 0.8}},
        "train_env_manager": {"num_env_groups": 4, "group_size": 3},
        "val_env_manager": {"num_env_groups": 4, "group_size": 3},
        "custom_envs": {"FrozenLake": {"max_steps": 3, "env_config": {"map_name": None}}},
    }
    for key, value in overrides.items():
        is_section = isinstance(value, Mapping) and key in values
        values[key] = {**values[key], **value} if is_section else value
    return PipelineConfig.model_validate(values)


def join_layout(config: PipelineConfig) -> Runtime:
    """This rank's place in the layout; Megatron's groups are made anew in the same process group."""
    if not dist.is_initialized():
        return start_runtime(config.parallel, seed=config.seed)
    leave_layout()
    return build_layout(config.parallel, seed=config.seed)


def build_trainer(config: PipelineConfig, runtime: Runtime) -> PolicyTrainer:
    """The trainer as the pipeline builds it."""
    tokenizer = build_tokenizer(config)
    allowed = tokenizer.action_ids if config.actor_infer.only_action_tokens else None
    return PolicyTrainer(config, runtime, vocab_size=tokenizer.vocab_size, allowed_tokens=allowed)


def build_scheduler(trainer: PolicyTrainer, ledger: Ledger | None = None) -> AgenticRolloutScheduler:
    """The real scheduler as the pipeline builds it."""
    ranks = TorchRankGroup(trainer.runtime.device)
    tokenizer = build_tokenizer(trainer.config)
    return AgenticRolloutScheduler(trainer.config, trainer, tokenizer, ledger or Ledger(), ranks=ranks)


def request(*, mode: Mode = "train", step: int = 0, policy_version: int = 0) -> RolloutRequest:
    """A request for the 12 episodes of ``rollout_config``."""
    return RolloutRequest(global_step=step, batch_size=12, mode=mode, policy_version=policy_version)


def save_batch(path: Path, batch: RolloutBatch) -> None:
    """The batch as a step file."""
    info = StepInfo(step=0, mode="train", scheduler_id="default", run_id="test", policy_version=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_step(batch, info).to_bytes())


def play_layout(root: Path, layout: str, model: str) -> None:
    """One batch under one layout."""
    routing = {"actor_infer": {"record_routed_experts": True}} if model == "experts" else {}
    config = rollout_config(MODELS[model], parse_layout(layout), **routing)
    trainer = build_trainer(config, join_layout(config))
    ledger = Ledger()
    scheduler = build_scheduler(trainer, ledger)
    batch = scheduler.get_batch(request())
    scheduler.close()
    folder = root / layout / model
    if trainer.runtime.is_writer:
        save_batch(folder / "rows.safetensors", batch)
    dist.barrier()
    facts = {
        "digest": batch.digest(),
        "metrics": scheduler.collect_metrics(),
        "ledger": ledger.as_dict(),
        "hears_leader": hears_leader(trainer.runtime),
        "routes_as_trained": routes_as_trained(trainer, batch) if routing and layout == ONE_RANK else None,
    }
    (folder / f"rank_{trainer.runtime.global_rank}.json").write_text(json.dumps(facts), encoding="utf-8")


def routes_as_trained(trainer: PolicyTrainer, batch: RolloutBatch) -> bool:
    """Whether one pass over whole rows chooses the recorded experts for every token that the engine has read."""
    config, found = trainer.config, RoutingTable.of_batch(batch, trainer.config.model, trainer.runtime.device)
    plan = place_step(batch, config.training, count_multiple=1, dtype=torch.float32)
    own = RoutingTable.empty(config.model, batch.row_offsets[:-1], len(batch.tokens))
    with trainer.router_ledger.using(own), own.doing("record"):
        trainer.compute_logprobs([own_batch(one, trainer.runtime) for one in plan.micro_batches])
    known = found.is_known
    assert int(known.sum()) == len(batch.tokens) - len(batch)  # the last token of no row is read
    return bool(torch.equal(own.experts[known], found.experts[known].int()))


def hears_leader(runtime: Runtime) -> bool:
    """Whether this rank has what its replica's leader said: a short pass, a long one, and that it is done."""
    channel = ReplicaChannel(runtime)
    told = [
        ForwardPass(kept=[0, 2], starts=[3, 4], tokens=[[5], [6, 7]], uniforms=[0.25, 0.1]),
        ForwardPass(kept=None, starts=[0], tokens=[list(range(2 * FIRST_WORDS))], uniforms=[0.5]),
        None,
    ]
    if not runtime.is_leader:
        return [channel.receive() for _ in told] == told
    for item in told:
        channel.send(item)
    return True


def main() -> None:
    """All layouts named on the command line, in order."""
    root, layouts = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    for layout in layouts:
        for model in models_of(layout):
            play_layout(root, layout, model)
    stop_runtime()


if __name__ == "__main__":
    main()
