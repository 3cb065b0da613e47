"""Plays with real engines in one process: ``-m tests.pipelines.workers.engine_worker FOLDER``.

A process of its own, since Megatron on the host replaces functions of torch for good. Writes ``FOLDER/{case}.json`` and
the batches as ``FOLDER/{case}.safetensors``; nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import JsonColumn
from mock_scheduler.ledger import Ledger
from pipelines.config.engine import GeneratingArgs
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.logprobs import sample_tokens
from pipelines.megatron.passes import run_chunk
from pipelines.megatron.places import ModelInputs, own_batch
from pipelines.megatron.process_of_rank import Runtime, stop_runtime
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.engine import PolicyEngine
from tests.dist.workers.rollout_worker import (
    MODELS,
    build_scheduler,
    build_trainer,
    join_layout,
    parse_layout,
    request,
    rollout_config,
    save_batch,
)
from tests.pipelines.step_plans import build_step_plan

UNCACHED = {"actor_infer": {"use_kv_cache": False}}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rope cached": ("rope", {}),
    "rope uncached": ("rope", UNCACHED),
    "rope cached float64": ("rope", {"precision": "float64"}),
    "rope uncached float64": ("rope", {"precision": "float64", **UNCACHED}),
    "learned cached": ("learned", {}),
    "learned uncached": ("learned", UNCACHED),
    "learned cached float64": ("learned", {"precision": "float64"}),
    "learned uncached float64": ("learned", {"precision": "float64", **UNCACHED}),
    "one block": ("rope", {"actor_infer": {"rows_per_forward": 64}}),
    "turns": ("rope", {"rollout_form": "step"}),
    "environment workers": ("rope", {"train_env_manager": {"num_env_workers": 2}}),
    "actions only": ("rope", {"actor_infer": {"only_action_tokens": True}}),
    "short": ("rope", {"sequence_length": 40, "actor_infer": {"max_new_tokens": 30}}),
}
ARGS = {
    "plain": GeneratingArgs(temperature=0.8),
    "cut": GeneratingArgs(temperature=0.7, top_k=9, top_p=0.6),
}
# Rows that begin with 3, 9, 1 and 6 tokens; row 1 ends after the first call, and row 0 after the second.
LENGTHS: Sequence[Mapping[int, int]] = ({0: 3, 1: 9, 2: 1, 3: 6}, {0: 4, 2: 14, 3: 7}, {2: 15, 3: 19}, {2: 30, 3: 20})


def play_case(folder: Path, case: str, runtime: Runtime) -> None:
    """One batch, with each sampled token's log-probability as the engine gave it."""
    model, overrides = CASES[case]
    config = rollout_config(MODELS[model], parse_layout("tp1"), **overrides)
    trainer, ledger = build_trainer(config, runtime), Ledger()
    scheduler = build_scheduler(trainer, ledger)
    engine = scheduler._engine
    assert isinstance(engine, PolicyEngine)
    sample, sampled = engine.sample, []

    def recorded(*arguments: Any) -> tuple[list[int], list[float]]:
        sampled.append(sample(*arguments))
        return sampled[-1]

    engine.sample = recorded  # type: ignore[assignment, method-assign]
    batch = scheduler.get_batch(request(policy_version=3))
    metrics = scheduler.collect_metrics()
    scheduler.close()
    save_batch(folder / f"{case}.safetensors", batch)
    facts = {
        "logprobs": [logprob for _, logprobs in sampled for logprob in logprobs],
        "trainer": max_difference_of_trainer(trainer, batch),
        "metrics": metrics,
        "ledger": ledger.as_dict()["built"],
        "is_training": all(chunk.training for chunk in trainer.policy.chunks),
    }
    write(folder, case, facts)


def max_difference_of_trainer(trainer: PolicyTrainer, batch: RolloutBatch) -> float:
    """The largest |trainer's logprob - engine's| over all response tokens."""
    nothing = torch.zeros(len(batch.rollout_logprobs))
    plan = build_step_plan(batch, nothing, nothing, trainer.config.training, count_multiple=1, dtype=torch.float32)
    micro_batches = plan.micro_batches
    own = [own_batch(micro_batch, trainer.runtime) for micro_batch in micro_batches]
    logprobs = trainer.compute_logprobs(own)
    return max(
        float((logprobs[one.index].double() - one.rollout_logprobs.double())[one.response_mask].abs().max())
        for one in micro_batches
        if one.num_tokens
    )


def compare_with_single_rows(folder: Path, name: str, runtime: Runtime, **overrides: object) -> None:
    """What the engine draws for rows of different lengths, and what a plain forward pass of each row alone says."""
    config = rollout_config(MODELS["rope"], parse_layout("tp1"), **overrides)
    trainer = build_trainer(config, runtime)
    engine = PolicyEngine(trainer, Ledger())
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, len(trainer.allowed), (4, 30), generator=generator).tolist()
    found: list[tuple[int, float]] = []
    expected: list[tuple[int, float]] = []
    for args in ARGS.values():
        with engine.generating(args):
            engine.begin_block()
            for lengths in LENGTHS:
                histories = [tokens[row][:length] for row, length in lengths.items()]
                uniforms = torch.rand(len(lengths), generator=generator, dtype=torch.float64).tolist()
                found += zip(*engine.sample(list(lengths), histories, uniforms), strict=True)
                pairs = zip(histories, uniforms, strict=True)
                expected += [plain_sample(trainer, history, uniform, args) for history, uniform in pairs]
    write(folder, name, {"found": found, "expected": expected})


@torch.no_grad()
def plain_sample(
    trainer: PolicyTrainer, history: Sequence[int], uniform: float, args: GeneratingArgs
) -> tuple[int, float]:
    """The next token of one row, by Megatron's own causal attention over all of it."""
    (chunk,) = trainer.policy.chunks
    tokens = torch.tensor([history])
    positions = torch.arange(len(history)).unsqueeze(0)
    logits = run_chunk(chunk, ModelInputs(tokens=tokens, positions=positions, row_ids=torch.zeros_like(tokens)))
    allowed = logits[:, -1, : len(trainer.allowed)]
    token, logprob = sample_tokens(allowed, torch.tensor([uniform], dtype=torch.float64), args)
    return int(token), float(logprob)


def validate(folder: Path, runtime: Runtime) -> None:
    """Validation twice, of which no step and no policy version changes anything, with training in between."""
    env_manager = {"num_env_groups": 4, "group_size": 3, "generating_args": {"temperature": 1.0, "top_k": 2}}
    custom_envs = {"FrozenLake": {"max_steps": 3, "env_config": {"map_name": None, "held_out_fraction": 0.5}}}
    config: PipelineConfig = rollout_config(
        MODELS["rope"], parse_layout("tp1"), val_env_manager=env_manager, custom_envs=custom_envs
    )
    scheduler = build_scheduler(build_trainer(config, runtime))
    first = scheduler.get_batch(request(mode="val", step=0))
    train = scheduler.get_batch(request(step=1))
    second = scheduler.get_batch(request(mode="val", step=5))
    scheduler.close()
    columns = {name: batch.extras["layout_digest"] for name, batch in (("val", first), ("train", train))}
    digests = {name: column.items for name, column in columns.items() if isinstance(column, JsonColumn)}
    write(
        folder,
        "validation",
        {
            "digests": [first.digest(), second.digest()],
            "layouts": digests,
            "sampling": [first.sampling.top_k, first.sampling.logprobs_mode],
            "train_episodes": sorted({identity.episode_id for identity in train.identities}),
        },
    )


def leave_by_error(folder: Path, runtime: Runtime) -> None:
    """Whether the model trains on after an error within a rollout."""
    trainer = build_trainer(rollout_config(MODELS["rope"], parse_layout("tp1")), runtime)
    engine = PolicyEngine(trainer, Ledger())
    during = None
    try:
        with engine.generating(ARGS["plain"]):
            during = [trainer.policy.chunks[0].training, torch.is_grad_enabled()]
            raise KeyError("environment")
    except KeyError:
        after = [trainer.policy.chunks[0].training, torch.is_grad_enabled()]
    write(folder, "error", {"during": during, "after": after})


def write(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """One JSON file."""
    (folder / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")


def main() -> None:
    """All cases."""
    folder = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    runtime = join_layout(rollout_config(MODELS["rope"], parse_layout("tp1")))
    for case in CASES:
        play_case(folder, case, runtime)
    compare_with_single_rows(folder, "rows", runtime)
    compare_with_single_rows(folder, "rows float64", runtime, precision="float64")
    validate(folder, runtime)
    leave_by_error(folder, runtime)
    stop_runtime()


if __name__ == "__main__":
    main()
