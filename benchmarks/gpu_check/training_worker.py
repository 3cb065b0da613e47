"""Runs one case of our training in a process: ``python -m benchmarks.gpu_check.training_worker FOLDER CASE``.

A case is ``impl-precision`` with words behind it, as ``local-bfloat16-repeat``: the first run of a pair or the second
(``repeat``), without deterministic settings (``free``), on the CPU (``cpu``), or only the last step from the checkpoint
of the first run (``resumed``). Each trains three steps of two updates on rows that follow from a seed, and writes
metrics, a trace of all gradients and parameters, and the settings read back to ``FOLDER/{case}``. Nothing is judged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.layouts.cases import GROUP_SIZE, NUM_GROUPS
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.determinism.guard import apply_deterministic_mode
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.checkpoint import load_checkpoint, save_checkpoint
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import start_runtime, stop_runtime
from pipelines.megatron.run_state import RunState, fixed_settings, read_run_state

SEED, NUM_STEPS, LONGEST_ROW = 42, 3, 120
FACTS_FILE = "facts.json"
# Heads of 64 and sizes in multiples of 64: what the kernels of a GPU are made for.
MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 512,
    "qk_layernorm": True,
    "rotary_base": 10000,
    "init_method_std": 0.05,
    "vocab_size": VOCAB_SIZE,
    "make_vocab_size_divisible_by": 64,
}


def build_config(impl: str, precision: str) -> PipelineConfig:
    """Two updates of eight rows per step."""
    groups = {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    return PipelineConfig.model_validate(
        {
            "exp_name": "gpu",
            "seed": SEED,
            "max_steps": NUM_STEPS,
            "rollout_batch_size": NUM_GROUPS * GROUP_SIZE,
            "val_batch_size": NUM_GROUPS * GROUP_SIZE,
            "sequence_length": 128,
            "precision": precision,
            "use_kl_loss": True,
            "model": {**MODEL, "transformer_impl": impl},
            "training": {"micro_batch_size": 2, "global_batch_size": 8, "sequence_multiple_of": 64, "lr": 1e-4},
            "actor_infer": {"only_action_tokens": True, "use_kv_cache": impl == "local"},
            "train_env_manager": groups,
            "val_env_manager": groups,
        }
    )


def train(learner: Learner, step: int, folder: Path) -> dict[str, float]:
    """One step, traced."""
    probe = StepProbe(learner.runtime, folder, step=step, config=TraceConfig(level="full"))
    metrics = learner.train_step(random_batch(SEED + step, longest=LONGEST_ROW), step=step, probe=probe)
    probe.save()
    return metrics


def main() -> None:
    """One case."""
    root, case = Path(sys.argv[1]), sys.argv[2]
    impl, precision, *words = case.split("-")
    folder, checkpoint = root / case, root / f"{impl}-{precision}" / "checkpoint"
    folder.mkdir(parents=True)
    apply_deterministic_mode(os.environ)
    config = build_config(impl, precision)
    runtime = start_runtime(config.parallel, seed=SEED)
    learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
    first_step, metrics = 0, {}
    if "resumed" in words:
        state = read_run_state(checkpoint)
        load_checkpoint(checkpoint, learner, state)
        first_step = state.next_step
    for step in range(first_step, NUM_STEPS):
        metrics[step] = train(learner, step, folder)
        if not words and step == NUM_STEPS - 2:
            fixed = fixed_settings(config, vocab_size=VOCAB_SIZE)
            state = RunState(next_step=step + 1, mode="real", fixed=fixed, scheduler={}, learner=learner.state_dict())
            save_checkpoint(checkpoint, learner, state)
    facts = {
        "metrics": metrics,
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": runtime.device.type,
        "optimizer": type(learner.policy.policy.observed.optimizers[0].optimizer).__module__.split(".")[0],
    }
    (folder / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    stop_runtime()


if __name__ == "__main__":
    main()
