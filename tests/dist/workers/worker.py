"""What the ranks of a distributed test run: ``-m tests.dist.workers.worker FOLDER LAYOUT ...`` under any launcher.

A layout is written as in ``tp2-pp2``. For each, and for each of two model variants, every rank writes to
``FOLDER/{layout}/{variant}``: initial parameters, gradients and parameters of one update, and the metrics of two. One
process samples the rows that all layouts train on. Nothing is judged here; the tests compare the files.
"""

from __future__ import annotations

import json
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.layout import ParallelConfig
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.ledger import Ledger
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.learner import Learner
from pipelines.megatron.logprobs import VocabShard, vocab_parallel_logprobs
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.process_of_rank import Runtime, leave_layout, start_runtime, stop_runtime
from pipelines.rollout.scheduler import AgenticRolloutScheduler
from tests.faults import norm_gradients_not_reduced
from tests.faults.harness import Fired

ONE_RANK = "tp1"
VARIANTS = {
    "qwen": ModelConfig(
        num_query_groups=2,
        ffn_hidden_size=128,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=False,
        rotary_base=100,
        init_method_std=0.08,
        make_vocab_size_divisible_by=16,
    ),
    "gpt2": ModelConfig(
        normalization="LayerNorm",
        swiglu=False,
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding_type="learned_absolute",
        init_method_std=0.08,
    ),
}


def parse_layout(text: str) -> ParallelConfig:
    """``tp2-pp2-sp`` as a configuration."""
    sizes = {axis: int(size) for axis, size in re.findall(r"(tp|pp|dp)(\d+)", text)}
    return ParallelConfig(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        data_parallel_size=sizes.get("dp", 1),
        sequence_parallel=text.endswith("-sp"),
    )


def build_config(variant: str, parallel: ParallelConfig) -> PipelineConfig:
    """A run of eight episodes and one update per step on the fixed 4×4 map."""
    return PipelineConfig.model_validate(
        {
            "exp_name": variant,
            "seed": 42,
            "max_steps": 2,
            "rollout_batch_size": 8,
            "val_batch_size": 8,
            "sequence_length": 128,
            "use_kl_loss": True,
            "entropy_loss_coef": 0.01,
            "model": VARIANTS[variant].model_dump(),
            "parallel": parallel.model_dump(),
            "training": {"micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3, "adam_eps": 1e-5},
            "actor_infer": {"only_action_tokens": True},
            "train_env_manager": {"num_env_groups": 4, "group_size": 2},
            "val_env_manager": {"num_env_groups": 4, "group_size": 2},
            "custom_envs": {"FrozenLake": {"max_steps": 5}},
        }
    )


def join_layout(config: PipelineConfig) -> Runtime:
    """This rank's place in the layout; Megatron's groups are made anew in the same process group."""
    if dist.is_initialized():
        leave_layout()
    return start_runtime(config.parallel, seed=config.seed)


def build_learner(config: PipelineConfig, runtime: Runtime) -> Learner:
    """The learner as the pipeline builds it."""
    tokenizer = build_tokenizer(config)
    return Learner(config, runtime, vocab_size=tokenizer.vocab_size, allowed_tokens=tokenizer.action_ids)


def write_rows(folder: Path, learner: Learner) -> None:
    """Sample one batch and write it; of one process alone."""
    tokenizer = build_tokenizer(learner.config)
    scheduler = AgenticRolloutScheduler(
        learner.config, learner.policy, tokenizer, Ledger(), ranks=TorchRankGroup(learner.runtime.device)
    )
    batch = scheduler.get_batch(RolloutRequest(global_step=0, batch_size=8, mode="train", policy_version=0))
    scheduler.close()
    info = StepInfo(step=0, mode="train", scheduler_id="default", run_id="test", policy_version=0)
    (folder / "rows.safetensors").write_bytes(encode_step(batch, info).to_bytes())


def batch_of(path: Path) -> RolloutBatch:
    """The rows that one process sampled, with rewards from -1 to 1, so that every group has something to learn."""
    batch, _ = decode_step(path.read_bytes())
    rewards = torch.linspace(-1.0, 1.0, len(batch)).tolist()
    rows = []
    for row, reward in zip(batch.rows(), rewards, strict=True):
        turn_rewards = torch.zeros_like(row.turn_rewards)
        turn_rewards[-1:] = reward
        rows.append(replace(row, turn_rewards=turn_rewards, reward=None))
    return RolloutBatch.from_trajectories(rows, sampling=batch.sampling, group_size=2)


def probe_of(learner: Learner, folder: Path) -> StepProbe:
    """What the pipeline traces of a step."""
    return StepProbe(learner.runtime, folder, step=0, config=TraceConfig(level="full"))


def write_metrics(folder: Path, name: str, metrics: dict[str, float]) -> None:
    """One JSON file per rank."""
    path = folder / f"{name}_{dist.get_rank()}.json"
    path.write_text(json.dumps(metrics), encoding="utf-8")


def write_live_logits(folder: Path, learner: Learner, batch: RolloutBatch) -> None:
    """How many micro-batches' logits are in memory whenever one is reduced to log-probabilities."""
    seen: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []
    policy = learner.policy
    compute = policy._logprobs

    def counted(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(weakref.ref(logits))
        counts.append(sum(1 for ref in seen if (tensor := ref()) is not None and tensor.numel() > 0))
        return compute(logits, targets)

    policy._logprobs = counted  # type: ignore[method-assign]
    policy.compute_logprobs(learner._owned_of_step(learner._place(batch)))
    del policy._logprobs
    (folder / f"live_logits_{dist.get_rank()}.json").write_text(json.dumps(counts), encoding="utf-8")


def run_variant(root: Path, layout: str, variant: str) -> None:
    """Everything about one variant under one layout."""
    config = build_config(variant, parse_layout(layout))
    folder = root / layout / variant
    folder.mkdir(parents=True, exist_ok=True)
    learner = build_learner(config, join_layout(config))
    if layout == ONE_RANK:
        write_rows(folder, learner)
    batch = batch_of(root / ONE_RANK / variant / "rows.safetensors")
    write_live_logits(folder, learner, batch)
    probe = probe_of(learner, folder / "trained")
    write_metrics(folder, "first", learner.train_step(batch, probe=probe))
    probe.save()
    write_metrics(folder, "next", learner.train_step(batch))


def run_planted_fault(root: Path, layout: str) -> None:
    """The first update again, with norm gradients left unreduced."""
    config = build_config("qwen", parse_layout(layout))
    folder = root / f"{layout}-fault" / "qwen"
    folder.mkdir(parents=True, exist_ok=True)
    learner = build_learner(config, join_layout(config))
    fired = Fired()
    norm_gradients_not_reduced.plant(fired)
    batch = batch_of(root / ONE_RANK / "qwen" / "rows.safetensors")
    probe = probe_of(learner, folder / "trained")
    write_metrics(folder, "first", learner.train_step(batch, probe=probe))
    probe.save()
    assert fired.count > 0, "the fault never fired"


def write_vocab_parallel_errors(root: Path, layout: str) -> None:
    """How far split logprobs, entropy and gradients are from the unsplit ones, in float64, with excluded columns."""
    runtime = join_layout(build_config("qwen", parse_layout(layout)))
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 4, 24, generator=generator, dtype=torch.float64) * 4
    allowed = torch.arange(24) < 21  # vocabulary padding: all of it lies on the last rank
    allowed[2] = False  # and one excluded token on the first
    targets = torch.randint(3, 21, (3, 4), generator=generator)
    weights = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    expected = vocab_parallel_logprobs(whole, targets, VocabShard(start=0, width=24, allowed=allowed), temperature=0.8)
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    width = 24 // runtime.tp_size
    columns = slice(runtime.tp_rank * width, (runtime.tp_rank + 1) * width)
    part = logits[..., columns].clone().requires_grad_()
    shard = VocabShard(
        start=columns.start,
        width=width,
        allowed=allowed[columns],
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    found = vocab_parallel_logprobs(part, targets, shard, temperature=0.8)
    (weights[0] * found[0] + weights[1] * found[1]).sum().backward()
    assert part.grad is not None
    assert whole.grad is not None
    pairs = {
        "logprobs": (found[0], expected[0]),
        "entropy": (found[1], expected[1]),
        "gradient": (part.grad, whole.grad[..., columns]),
    }
    errors = {name: float((one - other).abs().max()) for name, (one, other) in pairs.items()}
    (root / layout).mkdir(exist_ok=True)
    write_metrics(root / layout, "vocab", errors)


def main() -> None:
    """All layouts named on the command line, in order."""
    root, layouts = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    for layout in layouts:
        for variant in VARIANTS:
            run_variant(root, layout, variant)
    if layouts != [ONE_RANK]:
        write_vocab_parallel_errors(root, layouts[0])
        run_planted_fault(root, layouts[-1])
    stop_runtime()


if __name__ == "__main__":
    main()
