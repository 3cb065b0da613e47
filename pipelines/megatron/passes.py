"""Runs Megatron's schedules over micro-batches: forward passes without a graph, and an update's forward and backward.

The same calls serve every layout; outputs and losses are there on the last pipeline stage alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from mock_scheduler.megatron.observed_model import unwrapped
from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from pipelines.megatron.execution import Execution, LossFunction, LossSums, OutputReduction
from pipelines.megatron.layers.attention import RowRotaryEmbedding
from pipelines.megatron.layers.experts import padding_mask_argument
from pipelines.megatron.places import ModelInputs, OwnBatch
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trained_model import TrainedModel


def run_chunk(model: torch.nn.Module, inputs: ModelInputs) -> torch.Tensor:
    """Computes a chunk's output: logits ``[b, s, V / tp]`` or values ``[b, s, 1]`` of the last, else hidden states.

    A chunk other than the first reads the hidden states of ``set_input_tensor``.
    """
    gpt = unwrapped(model)
    arguments: dict[str, object] = {"attention_mask": inputs.attention_mask}
    if gpt.config.num_moe_experts is not None:
        arguments["padding_mask"] = padding_mask_argument(
            inputs.row_ids,
            gpt.built_from,
            positions=inputs.positions,
            is_first_chunk=gpt.pre_process,
            sequence_parallel=gpt.config.sequence_parallel,
        )
    if gpt.config.transformer_impl == "transformer_engine":
        arguments |= {"attention_mask": None, "packed_seq_params": _packed_rows(inputs)}
    elif isinstance(getattr(gpt, "rotary_pos_emb", None), RowRotaryEmbedding):
        gpt.rotary_pos_emb.positions = None if inputs.attention_mask is None else inputs.positions
    return model(inputs.tokens, inputs.positions, **arguments)


def _packed_rows(inputs: ModelInputs) -> PackedSeqParams | None:
    """TransformerEngine's description of rows that lie in one line, padding as a row of its own; else ``None``."""
    if inputs.attention_mask is None:
        return None
    line = inputs.row_ids[0]
    starts = torch.cat((line.new_ones(1, dtype=torch.bool), line[1:] != line[:-1])).nonzero().flatten()
    bounds = torch.cat((starts, starts.new_tensor([len(line)]))).int()
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def iterators(batches: Sequence[OwnBatch], num_chunks: int) -> object:
    """Returns the batches as Megatron's schedules read them: an iterator, or one for each of several chunks."""
    return iter(batches) if num_chunks == 1 else [iter(batches) for _ in range(num_chunks)]


def line_shape(batches: Sequence[OwnBatch], runtime: Runtime) -> dict[str, int]:
    """Gives ``seq_length`` and ``micro_batch_size`` of a schedule's batches: one shape unless it varies them."""
    num_lines, share = batches[0].inputs.tokens.shape
    return {"seq_length": share * runtime.cp_size, "micro_batch_size": num_lines}


def forward_only(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[OwnBatch],
    runtime: Runtime,
    execution: Execution,
    *,
    reduce: OutputReduction,
) -> dict[int, torch.Tensor]:
    """Returns ``reduce(own, output)`` of each batch by its index, without graph; nothing off the last stage.

    output: ``[b, s, V / tp]``; it is freed before the next batch's is computed, so ``reduce`` must not return a view of
    it. Every rank of the model-parallel group must call it.
    """
    passes = execution.together(batches)
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            kept = get_forward_backward_func()(
                forward_step_func=_reduced_output_step(execution, reduce),
                data_iterator=iterators(passes, len(chunks)),
                model=list(chunks),
                num_microbatches=len(passes),
                forward_only=True,
                collect_non_loss_data=True,
                **line_shape(passes, runtime),
            )
    finally:
        for chunk in chunks:
            chunk.train()
    return {index: values for by_index in kept for index, values in by_index.items()}


def _reduced_output_step(
    execution: Execution, reduce: OutputReduction
) -> Callable[[Iterator[OwnBatch], torch.nn.Module], tuple[torch.Tensor, Callable[..., dict[int, torch.Tensor]]]]:
    """Megatron's forward step: the model's output, and the function that reduces it on the last stage."""

    def step(
        data_iterator: Iterator[OwnBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., dict[int, torch.Tensor]]]:
        own = next(data_iterator)

        def collect(output: torch.Tensor, non_loss_data: bool) -> dict[int, torch.Tensor]:
            kept = execution.reduce_parts(own, output, reduce)
            # Megatron's loop (0.16.1) holds each output until it has the next, as its deallocate_output_tensor knows.
            output.data = output.new_empty(0)
            return kept

        return run_chunk(model, own.inputs), collect

    return step


@torch.no_grad()
def forward_in_sequence(
    chunks: Sequence[torch.nn.Module], inputs: ModelInputs, runtime: Runtime
) -> torch.Tensor | None:
    """Computes the model's output for one batch of any shape, on the last stage; ``None`` on the others.

    Chunk after chunk around the stages, with no micro-batches to overlap, as generation of one token at a time needs
    it. No other layout's order is followed. Every rank of the model-parallel group must call it.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    following, preceding = (runtime.pp_rank + 1) % runtime.pp_size, (runtime.pp_rank - 1) % runtime.pp_size
    output: torch.Tensor | None = None
    for chunk in chunks:
        gpt = unwrapped(chunk)
        if not gpt.pre_process:
            hidden = _received(gpt, inputs, runtime) if runtime.pp_size > 1 else output
            if runtime.pp_size > 1:
                assert hidden is not None
                dist.recv(hidden, src=dist.get_global_rank(group, preceding), group=group)
            gpt.set_input_tensor([hidden])
        output = run_chunk(chunk, inputs)
        if not gpt.post_process and runtime.pp_size > 1:
            dist.send(output.contiguous(), dst=dist.get_global_rank(group, following), group=group)
    return output if unwrapped(chunks[-1]).post_process else None


def _received(gpt: GPTModel, inputs: ModelInputs, runtime: Runtime) -> torch.Tensor:
    """An empty tensor of the shape and dtype of the hidden states that the stage before sends."""
    num_lines, length = inputs.tokens.shape
    length //= runtime.tp_size if gpt.config.sequence_parallel else 1
    return torch.empty(length, num_lines, gpt.config.hidden_size, dtype=gpt.config.params_dtype, device=runtime.device)


def accumulate_gradients(
    model: TrainedModel,
    batches: Sequence[OwnBatch],
    loss: LossFunction,
    *,
    update: int = 0,
    probe: TrainingProbe = NO_PROBE,
) -> dict[int, torch.Tensor]:
    """Accumulates gradients of all batches and reduces them over the layout; returns metrics by micro-batch index.

    The metrics are empty off the last stage. Every rank must call it, with the batches of its replica. ``update``: its
    number within the step, for the probe.
    """
    model.zero_grad()
    by_batch: dict[int, torch.Tensor] = {}
    with probe.watching(model.observed, update):
        for own_batches in model.execution.rounds(batches):
            sums = get_forward_backward_func()(
                forward_step_func=_loss_step(loss, model.execution, probe),
                data_iterator=iterators(own_batches, len(model.data_parallel)),
                model=list(model.data_parallel),
                num_microbatches=len(own_batches),
                forward_only=False,
                **line_shape(own_batches, model.runtime),
            )
            if model.runtime.is_last_stage:
                for own, metrics in zip(own_batches, sums, strict=True):
                    by_batch |= model.execution.metrics_of_parts(own, metrics)
    probe.state(model.observed, update, "gradient")
    return by_batch


def _loss_step(
    loss: LossFunction, execution: Execution, probe: TrainingProbe
) -> Callable[[Iterator[OwnBatch], torch.nn.Module], tuple[torch.Tensor, Callable[..., LossSums]]]:
    """Megatron's forward step: the model's output, and the function that makes it a loss."""

    def step(data_iterator: Iterator[OwnBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., LossSums]]:
        own = next(data_iterator)
        with probe.computing(own):
            output = run_chunk(model, own.inputs)
        return output, lambda output: execution.sum_parts(own, output, loss)

    return step
