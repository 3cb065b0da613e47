"""What the ranks of a test of Hugging Face checkpoints run: ``-m tests.dist.workers.hf_worker FOLDER TASK ...``.

A task is ``model/precision/layout``; ``FOLDER/model`` is a Hugging Face checkpoint. Each rank writes its parameters to
``FOLDER/{task}/rank_{N}.safetensors``, one of them the logits of ``token_ids`` to ``logits.safetensors``, and all
together a checkpoint of the pipeline to ``checkpoint``. Nothing is judged here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from benchmarks.layouts.cases import parallel_of
from mock_scheduler.determinism.agreement import TorchRankGroup
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.checkpoint import save_checkpoint
from pipelines.megatron.hf_source import read_source
from pipelines.megatron.learner import Learner
from pipelines.megatron.passes import forward_in_sequence
from pipelines.megatron.places import ModelInputs
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime
from pipelines.megatron.run_state import RunState, fixed_settings

_NUM_ROWS, LENGTH = 3, 32


def token_ids(vocab_size: int) -> torch.Tensor:
    """The tokens whose logits are compared, int64 ``[3, 32]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (_NUM_ROWS, LENGTH), generator=generator)


def config_of(root: Path, task: str) -> PipelineConfig:
    """The run of a task."""
    name, precision, layout = task.split("/")
    # The same batches under all layouts: each rank of dp needs rows.
    groups = {"num_env_groups": 4, "group_size": 2}
    return PipelineConfig.model_validate(
        {
            "exp_name": "huggingface",
            "rollout_batch_size": 8,
            "val_batch_size": 8,
            "sequence_length": 64,
            "precision": precision,
            "model": {"hf_checkpoint": str(root / name)},
            "parallel": parallel_of(layout),
            "training": {"micro_batch_size": 2, "global_batch_size": 8},
            "train_env_manager": groups,
            "val_env_manager": groups,
        }
    )


@torch.no_grad()
def compute_logits(learner: Learner, vocab_size: int) -> torch.Tensor | None:
    """Computes the logits ``[3, 32, V]``; ``None`` off the last stage. Every rank calls it."""
    tokens = token_ids(vocab_size)
    chunks = list(learner.policy.policy.chunks)
    for chunk in chunks:
        chunk.eval()
    inputs = ModelInputs(
        tokens=tokens,
        positions=torch.arange(LENGTH).expand_as(tokens),
        row_ids=torch.arange(_NUM_ROWS).unsqueeze(1).expand_as(tokens),
    )
    output = forward_in_sequence(chunks, inputs, learner.runtime)
    if output is None or learner.runtime.tp_size == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(learner.runtime.tp_size)]
    dist.all_gather(parts, output.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)


def run(root: Path, task: str) -> None:
    """Loads, computes and saves."""
    config, folder = config_of(root, task), root / task
    folder.mkdir(parents=True, exist_ok=True)
    runtime = build_layout(config.parallel, seed=config.seed)
    source = read_source(config.model, TorchRankGroup(runtime.device))
    vocab_size = int(config.model.vocab_size or 0)
    learner = Learner(config, runtime, vocab_size=vocab_size, allowed_tokens=None)
    parameters = {local.spec.name: local.parameter.detach().clone() for local in learner.policy.policy.parameters()}
    save_file(parameters, folder / f"rank_{runtime.global_rank}.safetensors")
    logits = compute_logits(learner, vocab_size)
    if logits is not None and runtime.tp_rank == 0 and runtime.dp_rank == 0:
        save_file({"logits": logits[..., :vocab_size].contiguous()}, folder / "logits.safetensors")
    state = RunState(
        next_step=1,
        mode="real",
        fixed=fixed_settings(config, vocab_size=vocab_size),
        scheduler={},
        learner=learner.state_dict(),
    )
    save_checkpoint(folder / "checkpoint", learner, state, source=source)


def main() -> None:
    """All tasks named on the command line, in order."""
    root, tasks = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    start_runtime(config_of(root, tasks[0]).parallel, seed=42)
    leave_layout()
    for task in tasks:
        run(root, task)
        dist.barrier()
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
