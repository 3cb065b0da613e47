"""Builds one model per line of a JSON file and prints its parameters' canonical names and global shapes.

``-m tests.pipelines.workers.list_parameters FILE``: a line is a ``PipelineConfig``; ``vocab_size`` is the model's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.model import build_chunks
from pipelines.megatron.process_of_rank import start_runtime, stop_runtime
from pipelines.megatron.transformer_config import build_transformer_config


def main() -> None:
    """One line of output per line of input."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    configs = [PipelineConfig.model_validate_json(line) for line in lines]
    runtime = start_runtime(configs[0].parallel, seed=0)
    for config in configs:
        vocab_size = config.model.vocab_size
        assert vocab_size is not None
        chunks = build_chunks(
            config,
            build_transformer_config(config),
            vocab_size=vocab_size,
            vocab_parts=runtime.tp_size,
            runtime=runtime,
        )
        model = ObservedModel(chunks=chunks, ranks=runtime, vocab_size=vocab_size, num_replicas=1)
        specs = [parameter.spec for parameter in iterate_parameters(model)]
        print(json.dumps([[spec.name, list(spec.global_shape)] for spec in specs]))
    stop_runtime()


if __name__ == "__main__":
    main()
