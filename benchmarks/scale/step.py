"""One real training step of a large Megatron model, with and without a whole trace of its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.layouts.options import merge_changes
from benchmarks.scale.tasks import Figures, watch
from benchmarks.trace import Benchmark, build_large_config
from mock_scheduler.config.instruments import TraceConfig
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.process_of_rank import start_runtime, stop_runtime

#: A layer of a model of 8 billion parameters; 218 million of its own.
_LAYER = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14_336,
    "init_method_std": 0.01,
}
_SEED = 11


def build_config(num_layers: int) -> PipelineConfig:
    """Builds the configuration of a model of so many large layers."""
    changes = {"model": {**_LAYER, "num_layers": num_layers}, "training": {"micro_batch_size": 16}}
    return PipelineConfig.model_validate(merge_changes(build_large_config().model_dump(), [changes]))


def take_steps(folder: Path, num_layers: int) -> tuple[int, dict[str, Figures]]:
    """Trains one step without a trace and one with its gradients; the trace stays in the folder.

    Returns:
        The number of parameters, and what each step took. Memory: beyond that of the model and its optimizer, which
        the first step has filled.
    """
    warnings.filterwarnings("ignore")  # Megatron's and torch's on themselves
    with _benchmark(folder, num_layers) as benchmark:
        benchmark.take_step(None)
        figures = {}
        with watch(folder) as figures["without a trace"]:
            benchmark.take_step(None)
        with watch(folder) as figures["gradients traced"]:
            benchmark.take_step(TraceConfig(level="full", kinds=["gradient"]), keep=True)
        return benchmark.num_parameters, figures


@contextmanager
def _benchmark(folder: Path, num_layers: int) -> Iterator[Benchmark]:
    config = build_config(num_layers)
    runtime = start_runtime(config.parallel, seed=_SEED)
    try:
        yield Benchmark(runtime, folder, config)
    finally:
        stop_runtime()
