"""Writes a checkpoint again as releases before seals did.

``-m tests.pipelines.workers.old_checkpoint_writer RUN FOLDER``: RUN is a finished run, whose checkpoint of
step 1 is taken.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import yaml
from torch.distributed import distributed_c10d

from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer, vocab_size_in_effect
from pipelines.megatron.checkpoint import load_checkpoint
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import start_runtime, stop_runtime
from pipelines.megatron.run_state import read_run_state
from tests.dist.old_checkpoint import save_old_checkpoint


def main() -> None:
    """Loads and saves."""
    run, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = PipelineConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    runtime = start_runtime(config.parallel, seed=config.seed)
    distributed_c10d._unpickler = pickle.Unpickler  # Megatron's own checkpoints exchange objects of its classes
    vocab_size = vocab_size_in_effect(config, build_tokenizer(config))
    learner = Learner(config, runtime, vocab_size=vocab_size, allowed_tokens=None)
    origin = run / "checkpoints" / "step_000001"
    state = read_run_state(origin)
    load_checkpoint(origin, learner, state)
    save_old_checkpoint(target, learner, state)
    stop_runtime()


if __name__ == "__main__":
    main()
