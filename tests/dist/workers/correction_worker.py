"""Trains corrected steps of cases of ``benchmarks.layouts``: ``-m tests.dist.workers.correction_worker FOLDER TASK ...``.

A task is ``{correction}/{layout}/{option}``, a correction of ``CORRECTIONS``. ``FOLDER/{task}/{rank}.json`` gets the
step's metrics and, by ``kind/update/name`` and ``row,position``, the weights and kept tokens that this rank trained
with. The rollouts' log-probabilities are those of a policy that differs from the one that is trained, by a noise that
follows from the seed. Nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.batch import RolloutBatch
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner
from pipelines.megatron.places import OwnBatch
from mock_scheduler.megatron.step_tokens import MicroBatchTokens
from mock_scheduler.megatron.probe.interface import TrainingProbe
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime

CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "decoupled": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.3,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k2,seq_mean_k1",
        "rollout_rs_threshold": "0.4,0.7_1.4",
        "rollout_token_veto_threshold": 0.3,
    },
    "segment-kept": {
        "rollout_is": "segment",
        "rules": [
            {"level": "segment", "action": "reject_token", "aggregation": "mean", "lower": 0.7, "upper": 1.4},
            {"level": "token", "action": "reject_token", "estimator": "k1", "upper": 0.2, "when": "negative_advantage"},
        ],
        "rs_denominator": "kept",
    },
    "bypass": {
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.08,
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rs_denominator": "kept",
        "rollout_kl_in_advantage": 0.01,
    },
    "ratio": {"preset": "prime_ipo"},
    "gmpo": {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
}
# Keys beside the correction.
OTHER_KEYS: dict[str, dict[str, Any]] = {
    "decoupled": {"loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {"policy_loss": "gmpo", "loss_agg_mode": "seq-mean-token-sum"},
}


class Recorder(TrainingProbe):
    """Keeps what each of this rank's response tokens was trained with."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, float]] = {}

    def tokens(
        self,
        kind: str,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        prefix: str = "",
        of_responses: bool = True,
    ) -> None:
        batch = own
        for name in {"weights", "kept", "advantages"} & values.keys():
            table = self.values.setdefault(f"{kind}/{update}/{name}", {})
            for line, column in batch.response_mask.nonzero().tolist():
                place = f"{int(batch.row_ids[line, column])},{int(batch.positions[line, column])}"
                table[place] = float(values[name][line, column])


def mismatched_batch(form: str) -> RolloutBatch:
    """Random rows that a policy sampled whose log-probabilities differ by noise of deviation 0.3."""
    batch = random_batch(SEED, longest=LONGEST_ROW, form=form)  # type: ignore[arg-type]
    noise = torch.randn(len(batch.rollout_logprobs), generator=torch.Generator().manual_seed(SEED))
    versions = torch.arange(len(batch.policy_versions), dtype=torch.int32) % 3
    return replace(
        batch,
        rollout_logprobs=(batch.rollout_logprobs + 0.3 * noise).clamp(max=-1e-3),
        policy_versions=versions,
    )


def config_of(correction: str, layout: str, option: str) -> PipelineConfig:
    """The case in float64, with the correction and two epochs."""
    plain = build_config(Case(model="dense", precision="float64", layout=layout, option=option)).model_dump()
    section = CORRECTIONS[correction]
    plain["model"]["num_layers"] = 2
    return PipelineConfig.model_validate(
        {
            **plain,
            "ppo_epochs": 2,
            "algorithm": {"rollout_correction": section} if section else {},
            **OTHER_KEYS.get(correction, {}),
        }
    )


def run_task(root: Path, task: str) -> None:
    """One task, from the canonical initial weights. Every rank must call it."""
    correction, layout, option = task.split("/")
    config = config_of(correction, layout, option)
    runtime = build_layout(config.parallel, seed=SEED)
    learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
    recorder = Recorder()
    metrics = learner.train_step(mismatched_batch(config.rollout_form), step=2, probe=recorder)
    path = root / task / f"{dist.get_rank()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = recorder.values if runtime.is_last_stage else {}
    path.write_text(json.dumps({"metrics": metrics, "values": values}), encoding="utf-8")
    dist.barrier()


def main() -> None:
    """All tasks named on the command line, in order."""
    root, tasks = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    start_runtime(config_of(*tasks[0].split("/")).parallel, seed=SEED)
    leave_layout()
    for task in tasks:
        run_task(root, task)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
