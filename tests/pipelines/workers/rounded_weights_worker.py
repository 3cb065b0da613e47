"""Plays with rounded weights on real ranks: ``-m tests.pipelines.workers.rounded_weights_worker FOLDER LAYOUT ...``.

A process of its own, since Megatron on the host replaces functions of torch for good. For each layout every rank writes
``FOLDER/{layout}/{case}/rank_{rank}.json``, and rank 0 the batch; one process answers all other cases. Nothing is
judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.ledger import Ledger
from mock_scheduler.megatron.optimizer_state import read_states
from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.learner import Learner
from pipelines.megatron.logprobs import process_logits
from pipelines.megatron.passes import run_chunk
from pipelines.megatron.places import ModelInputs, own_batch
from pipelines.megatron.process_of_rank import Runtime, stop_runtime
from pipelines.megatron.trained_model import TrainedModel
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.rollout.engine import PolicyEngine
from tests.dist.workers.rollout_worker import (
    MODELS,
    ONE_RANK,
    build_scheduler,
    build_trainer,
    join_layout,
    parse_layout,
    request,
    rollout_config,
    save_batch,
)
from tests.pipelines.step_plans import build_step_plan

ROUNDED: Mapping[str, Any] = {"actor_infer": {"weights_precision": "bfloat16"}}
UNCACHED: Mapping[str, Any] = {"actor_infer": {"weights_precision": "bfloat16", "use_kv_cache": False}}
# Name -> model, what the configuration has besides the key.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rope": ("rope", ROUNDED),
    "learned": ("learned", ROUNDED),
    "experts": ("experts", ROUNDED),
    "uncached": ("rope", UNCACHED),
    "float64": ("rope", {"precision": "float64", **ROUNDED}),
}
OPTIMIZERS = {"distributed": True, "plain": False}


class PlantedError(Exception):
    """Leaves a rollout."""


def bits(model: TrainedModel) -> list[str]:
    """A digest of every parameter of this rank."""
    return [compute_tensor_digest(one.parameter.detach().cpu()) for one in model.parameters()]


def round_by_hand(trainer: PolicyTrainer) -> None:
    """Keep the 16 high bits of every float32 weight, rounded to nearest even by integer arithmetic."""
    for one in trainer.policy.parameters():
        values = one.parameter.detach()
        pattern = values.float().view(torch.int32).long()
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16 << 16
        values.copy_(rounded.int().view(torch.float32))


@torch.no_grad()
def plain_logprobs(trainer: PolicyTrainer, batch: RolloutBatch) -> list[float]:
    """Of each response token, by Megatron's own causal attention over its row alone."""
    (chunk,) = trainer.policy.chunks
    found: list[float] = []
    args = trainer.config.actor_infer.generating_args
    for row in batch.rows():
        tokens = row.tokens.long().unsqueeze(0)
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        logits = run_chunk(chunk, ModelInputs(tokens=tokens, positions=positions, row_ids=torch.zeros_like(tokens)))
        logprobs = process_logits(logits[0, :, : len(trainer.allowed)], args)
        places = row.response_mask.nonzero().flatten()
        found += logprobs[places - 1, tokens[0, places]].tolist()
    return found


def trainer_logprobs(trainer: PolicyTrainer, batch: RolloutBatch) -> list[float]:
    """The trainer's own of each response token, in the order of micro-batches."""
    nothing = torch.zeros(len(batch.rollout_logprobs))
    plan = build_step_plan(batch, nothing, nothing, trainer.config.training, count_multiple=1, dtype=torch.float32)
    logprobs = trainer.compute_logprobs([own_batch(one, trainer.runtime) for one in plan.micro_batches])
    return [value for one in plan.micro_batches for value in logprobs[one.index].double()[one.response_mask].tolist()]


def play(trainer: PolicyTrainer) -> RolloutBatch:
    """One batch of the real scheduler."""
    scheduler = build_scheduler(trainer)
    batch = scheduler.get_batch(request())
    scheduler.close()
    return batch


@contextmanager
def weights_seen(trainer: PolicyTrainer) -> Iterator[dict[str, list[str]]]:
    """The digests of the parameters before the block and after it."""
    seen = {"before": bits(trainer.policy)}
    yield seen
    seen["after"] = bits(trainer.policy)


def config_of(case: str, layout: str, *, is_rounded: bool = True) -> PipelineConfig:
    """The configuration of a case, or the same without the key."""
    model, overrides = CASES[case]
    if not is_rounded:
        engine = {key: value for key, value in overrides["actor_infer"].items() if key != "weights_precision"}
        overrides = {**overrides, "actor_infer": engine}
    return rollout_config(MODELS[model], parse_layout(layout), **overrides)


def play_layout(folder: Path, layout: str, case: str) -> None:
    """One batch, the parameters before, in and after an engine's block, and after one that an error ends."""
    config = config_of(case, layout)
    trainer = build_trainer(config, join_layout(config))
    with weights_seen(trainer) as played:
        batch = play(trainer)
    engine = PolicyEngine(trainer, Ledger())
    with weights_seen(trainer) as failed:
        try:
            with engine.generating(config.actor_infer.generating_args):
                failed["during"] = bits(trainer.policy)
                raise PlantedError
        except PlantedError:
            pass
    where = folder / layout / case
    where.mkdir(parents=True, exist_ok=True)
    if trainer.runtime.is_writer:
        save_batch(where / "rows.safetensors", batch)
    facts = {"digest": batch.digest(), "played": played, "failed": failed}
    write(where / f"rank_{trainer.runtime.global_rank}.json", facts)


def compare_with_hand(folder: Path, case: str, runtime: Runtime) -> None:
    """The engine that rounds; beside it one of a model rounded by hand, plain passes of that, and the unrounded one."""
    rounding = build_trainer(config_of(case, ONE_RANK), runtime)
    batch = play(rounding)
    by_hand = build_trainer(config_of(case, ONE_RANK, is_rounded=False), runtime)
    unrounded = {"bits": bits(by_hand.policy), "logprobs": trainer_logprobs(by_hand, batch)}
    round_by_hand(by_hand)
    expected = play(by_hand)
    facts = {
        "recorded": batch.rollout_logprobs.tolist(),
        "plain": plain_logprobs(by_hand, batch),
        "digests": [batch.digest(), expected.digest()],
        "trainer": trainer_logprobs(rounding, batch),
        "unrounded": unrounded["logprobs"],
        "trainer_by_hand": trainer_logprobs(by_hand, batch),
        "bits": bits(rounding.policy) == unrounded["bits"] != bits(by_hand.policy),
    }
    write(folder / f"hand {case}.json", facts)


def train_with_and_without(folder: Path, optimizer: str, runtime: Runtime) -> None:
    """Two steps on one batch, by a learner whose engine plays before each, and by one that plays nothing."""
    config = config_of("rope", ONE_RANK).model_copy()
    training = config.training.model_copy(update={"use_distributed_optimizer": OPTIMIZERS[optimizer], "lr": 1e-2})
    config = config.model_copy(update={"training": training})
    vocab_size = build_tokenizer(config).vocab_size
    playing, still = (Learner(config, runtime, vocab_size=vocab_size) for _ in range(2))
    batch = play(playing.policy)
    states: list[list[str]] = []
    for learner in (playing, still):
        for step in range(2):
            if learner is playing:
                play(learner.policy)
            learner.train_step(batch, step=step)
        moments = [
            compute_tensor_digest(value)
            for state in read_states(learner.policy.policy.observed).values()
            for value in state.values()
        ]
        states.append(bits(learner.policy.policy) + moments)
    write(folder / f"trained {optimizer}.json", {"playing": states[0], "still": states[1]})


def write(path: Path, facts: Mapping[str, Any]) -> None:
    """One JSON file."""
    path.write_text(json.dumps(facts), encoding="utf-8")


def main() -> None:
    """All layouts named on the command line; in one process everything else too."""
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    for layout in layouts:
        play_layout(folder, layout, "rope")
    if layouts == [ONE_RANK]:
        runtime = join_layout(config_of("rope", ONE_RANK))
        for case in CASES:
            compare_with_hand(folder, case, runtime)
        for optimizer in OPTIMIZERS:
            train_with_and_without(folder, optimizer, runtime)
    stop_runtime()


if __name__ == "__main__":
    main()
