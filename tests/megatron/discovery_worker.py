"""Builds models of many kinds and traces a step of each: ``python -m tests.megatron.discovery_worker FOLDER CASE ...``.

A case is ``kind/layout``. Weights are drawn by canonical name, so every layout of a kind has the same ones where names
and shards are right. Each rank writes its parameters' places and the outputs it shows to ``FOLDER/CASE/RANK.json``, and
values and gradients of these outputs, with all gradients, to the trace in ``FOLDER/CASE``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.megatron.full_precision import prepare_optimizer
from mock_scheduler.megatron.host_device import define_router_gemm
from mock_scheduler.megatron.observed_model import ObservedModel, observe_model
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.probe.observed import observed_outputs, unobserved_outputs
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.megatron.step_tokens import TokenBatch
from mock_scheduler.trace.entries import RowTable
from mock_scheduler.trace.shards import cut_shard
from pipelines.megatron.layers.repairs import TorchNorm
from pipelines.megatron.process_of_rank import build_layout, join_group, leave_layout, stop_runtime

SEED, VOCABULARY, PADDED, LENGTH, ROWS = 5, 90, 96, 8, 2
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp64",
    "moe_token_dispatcher_type": "alltoall",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "vision": {},
    "adapter": {},
    "experts": {**_EXPERTS, "moe_shared_expert_intermediate_size": 20, "moe_layer_freq": [0, 1, 1, 1]},
    "allgather": {**_EXPERTS, "moe_token_dispatcher_type": "allgather"},
    "latent": {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
        "rope_type": "rope",
    },
    "predicting": {"mtp_num_layers": 2},
}  # fmt: skip


class LatentAttention(DotProductAttention):
    """Megatron's local attention with heads of queries that are longer than those of values."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Adapter(torch.nn.Module):
    """LoRA's two factors as Megatron-Bridge names them."""

    def __init__(self, config: TransformerConfig, num_outputs: int) -> None:
        super().__init__()
        build = partial(ColumnParallelLinear, config=config, init_method=config.init_method, bias=False)
        self.linear_in = build(config.hidden_size, 4, gather_output=True)
        self.linear_out = build(4, num_outputs, gather_output=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Both factors one after another."""
        output: torch.Tensor = self.linear_out(self.linear_in(hidden)[0])[0]
        return output


class Adapted(torch.nn.Module):
    """A linear layer within its adapter; its own weight is frozen."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.to_wrap = layer.requires_grad_(requires_grad=False)
        self.adapter = Adapter(layer.config, layer.output_size)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output with the adapter's, and the bias that is left to the next operation."""
        output, bias = self.to_wrap(hidden)
        return output + self.adapter(hidden), bias


class Vision(torch.nn.Module):
    """A vision-language model that has no picture to look at."""

    def __init__(self, gpt: GPTModel) -> None:
        super().__init__()
        self.language_model = gpt
        self.config = gpt.config
        self.vision_model = torch.nn.Linear(4, 4, dtype=torch.float64) if gpt.pre_process else None
        self.set_input_tensor, self.model_type = gpt.set_input_tensor, gpt.model_type
        self.pre_process, self.post_process = gpt.pre_process, gpt.post_process
        self.share_embeddings_and_output_weights = False

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """The language model alone."""
        output: torch.Tensor = self.language_model(*args, **kwargs)
        return output


def build_config(kind: str, parallel: ParallelConfig) -> TransformerConfig:
    """Four layers in float64, gated and with biased queries."""
    config = MLATransformerConfig if kind == "latent" else TransformerConfig
    return config(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4 if kind == "latent" else 2,
        kv_channels=8,
        ffn_hidden_size=24,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        apply_rope_fusion=False,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        overlap_p2p_comm=parallel.num_chunks > 1,
        batch_p2p_comm=parallel.num_chunks == 1,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **_OPTIONS[kind],
    )


def _specs(kind: str, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    def layer(number: int) -> Any:
        has_experts = isinstance(config.moe_layer_freq, int) or config.moe_layer_freq[number]
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            qk_layernorm=True,
            normalization="RMSNorm",
            multi_latent_attention=kind == "latent",
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
        attention = spec.submodules.self_attention.submodules
        if kind == "latent":
            attention.q_layernorm = attention.kv_layernorm = TorchNorm
            attention.core_attention = LatentAttention
        else:
            attention.q_layernorm = attention.k_layernorm = TorchNorm
        return spec

    count, parts = get_num_layers_to_build(config, vp_stage=vp_stage), mpu.get_pipeline_model_parallel_world_size()
    first = ((vp_stage or 0) * parts + mpu.get_pipeline_model_parallel_rank()) * count
    return TransformerBlockSubmodules(
        layer_specs=[layer(first + index) for index in range(count)], layer_norm=TorchNorm
    )


def build_model(
    kind: str, config: TransformerConfig, num_chunks: int, *, is_distributed: bool
) -> list[DistributedDataParallel]:
    """This rank's chunks."""
    chunks = []
    for vp_stage in [None] if num_chunks == 1 else range(num_chunks):
        specs = _specs(kind, config, vp_stage)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=specs,
            vocab_size=PADDED,
            max_sequence_length=LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            mtp_block_spec=_mtp_specs(config, specs, vp_stage),
            vp_stage=vp_stage,
        )
        if kind == "adapter":
            for layer in gpt.decoder.layers:
                layer.mlp.linear_fc1 = Adapted(layer.mlp.linear_fc1)
        inner = Vision(gpt) if kind == "vision" else gpt
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        chunks.append(DistributedDataParallel(config, buffers, inner))
    return chunks


def _mtp_specs(config: TransformerConfig, specs: TransformerBlockSubmodules, vp_stage: int | None) -> Any:
    if config.mtp_num_layers is None:
        return None
    block = get_gpt_mtp_block_spec(config, specs, use_transformer_engine=False, vp_stage=vp_stage)
    for spec in block.layer_specs if block is not None else ():
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = TorchNorm
    return block


@torch.no_grad()
def set_weights(model: ObservedModel) -> None:
    """The same numbers in every layout, drawn by name."""
    for item in iterate_parameters(model):
        generator = torch.Generator().manual_seed(SEED + sum(item.spec.name.encode()))
        values = torch.randn(item.spec.global_shape, generator=generator, dtype=torch.float64) * 0.2
        item.parameter.copy_(cut_shard(values + ("norm" in item.spec.name), item.spec))


def run_case(folder: Path, case: str) -> None:
    """One traced update of two micro-batches on each replica. Every rank must call it."""
    kind, layout = case.split("/")
    words = [word for word in layout.split("-") if word not in ("sp", "distributed")]
    degrees: dict[str, object] = {_AXES[word.rstrip("0123456789")]: int(word[-1]) for word in words}
    parallel = ParallelConfig.model_validate({**degrees, "sequence_parallel": "sp" in layout})
    build_layout(parallel, seed=SEED)
    define_router_gemm()
    config = build_config(kind, parallel)
    is_distributed = "distributed" in layout.split("-")
    chunks = build_model(kind, config, parallel.num_chunks, is_distributed=is_distributed)
    model = observe_model(chunks, None, vocab_size=VOCABULARY)
    set_weights(model)
    prepare_optimizer(torch.float64)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, clip_grad=0.0, params_dtype=torch.float64, use_distributed_optimizer=is_distributed
    )
    model = replace(model, optimizer=get_megatron_optimizer(adam, chunks))
    place = folder / case
    place.mkdir(parents=True, exist_ok=True)
    facts = {
        "parameters": [asdict(item.spec) for item in iterate_parameters(model)],
        "observed": [item.name for item in observed_outputs(model)],
        "unobserved": sorted({(item.name, item.reason) for item in unobserved_outputs(model)}),
        "coordinates": model.ranks.coordinates,
        "num_replicas": model.num_replicas,
    }
    (place / f"{model.ranks.global_rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    trace(model, place)


def micro_batches() -> list[TokenBatch]:
    """The four micro-batches of the update."""
    batches = []
    for number in range(4):
        row_ids = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH) + ROWS * number
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        batches.append(TokenBatch(index=number, row_ids=row_ids, positions=positions, response_mask=mask))
    return batches


def trace(model: ObservedModel, place: Path) -> None:
    """Writes one step's trace."""
    kinds = ["activation", "router", "logits", "activation_gradient", "gradient", "initial", "optimizer"]
    config = TraceConfig.model_validate({"level": "full", "kinds": kinds})
    all_batches, counts = micro_batches(), [0] * len(model.chunks)
    batches = all_batches[model.ranks.dp_rank :: model.ranks.dp_size]
    rows = RowTable(identities=tuple(map(str, range(4 * ROWS))), lengths=(LENGTH,) * 4 * ROWS)

    with StepProbe(model.ranks, place / "trace", step=0, config=config) as probe:

        def forward_step(_: object, chunk: Any) -> Any:
            number = list(model.chunks).index(chunk)
            batch = batches[counts[number]]
            counts[number] += 1
            generator = torch.Generator().manual_seed(SEED + batch.index)
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
            with probe.computing(batch):
                losses = chunk(tokens[:, :-1], batch.positions, mask, labels=tokens[:, 1:].contiguous())
            return losses, lambda values: (values.sum(), torch.tensor(values.numel(), dtype=torch.int), {})

        probe.start_step(rows, batches, [model])
        probe.start_update(0, all_batches)
        for number in range(len(model.chunks)):
            buffers: Any = model.chunks[number]
            buffers.zero_grad_buffer()
        with probe.watching(model, 0):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[None] * len(model.chunks),
                model=list(model.chunks),
                num_microbatches=len(batches),
                seq_length=LENGTH,
                micro_batch_size=ROWS,
            )
        probe.state(model, 0, "gradient")
        assert model.optimizer is not None
        model.optimizer.step()
        probe.state(model, 0, "optimizer")


def main() -> None:
    """All cases named on the command line, in order."""
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    # megatron-core 0.16.1 believes TransformerEngine to be here, whose wrappers import without it, and then compares
    # types with None.
    multi_latent_attention.HAVE_TE = False
    join_group()
    for case in cases:
        run_case(folder, case)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
