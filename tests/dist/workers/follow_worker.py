"""Trains a plain Megatron loop: ``-m tests.dist.workers.follow_worker FOLDER CASE ...``.

A case is ``model/precision/layout`` with options of the training behind the model's ``+``. In several processes it is
the layout itself; in one process the layout is followed, wrongly where a fault and a colon stand before the case. Each
rank writes its parameters, gradients, norms and losses of two updates to ``FOLDER/CASE/RANK.pt``, with the fault's name
before the case's; a refusal stands beside them. Nothing is judged here.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.utils import get_batch_on_this_cp_rank

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.megatron.emulation import arithmetic, cross_entropy, experts, gradients, parts
from mock_scheduler.megatron.emulation.engine import Engine
from mock_scheduler.megatron.emulation.follow import TrainingOrder, follow
from mock_scheduler.megatron.host_device import define_router_gemm
from mock_scheduler.megatron.partition import main_grad
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.ordered_collectives import use_ordered_reductions
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.trace.shards import ShardSpec, cut_shard
from pipelines.megatron.process_of_rank import build_layout, join_group, leave_layout, stop_runtime

REFUSAL = "refusal.txt"
SEED, VOCABULARY, LENGTH, ROWS, MICRO_BATCHES, UPDATES = 11, 96, 16, 2, 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training: ``model`` with options, ``precision``, layout."""

    model: str
    options: frozenset[str]
    bf16: bool
    parallel: ParallelConfig
    is_distributed: bool

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a name as ``gpt+means/float32/tp2-sp-plain``."""
        model, precision, layout = name.split("/")
        kind, *options = model.split("+")
        words = [word for word in layout.split("-") if word != "plain"]
        return cls(
            model=kind,
            options=frozenset(options),
            bf16=precision == "bfloat16",
            parallel=ParallelConfig.model_validate(_layout(words)),
            is_distributed="plain" not in layout.split("-"),
        )


def _layout(words: Sequence[str]) -> dict[str, object]:
    axes = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "dp": "data_parallel_size",
    }
    degrees: dict[str, object] = {axes[word.rstrip("0123456789")]: int(word[-1]) for word in words if word != "sp"}
    return {**degrees, "sequence_parallel": "sp" in words}


class Norm:
    """Builds torch's norm; its parameters are marked, so that Megatron sums their gradients over tp."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        """Of the kind that the configuration names."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class OwnNorm(torch.nn.RMSNorm):
    """A norm of a user's own."""


class OwnAttention(DotProductAttention):
    """Megatron's attention over packed rows, by a mask, or over keys of all cp ranks: a class of a user's own."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        """Like Megatron's, which refuses context parallelism."""
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attends over ``[t, heads, d]``, or ``[s, b, heads, d]``; returns ``[t, 1, h]`` or ``[s, b, h]``."""
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            bounds = packed_seq_params.cu_seqlens_q
            rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
            later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
            attention_mask = ((rows[:, None] != rows[None, :]) | later)[None, None]
        elif mpu.get_context_parallel_world_size() > 1:
            group = mpu.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
            places = [zigzag(rank, len(key)) for rank in range(mpu.get_context_parallel_world_size())]
            own = places[mpu.get_context_parallel_rank()]
            attention_mask = (torch.cat(places)[None, :] > own[:, None])[None, None]
        return super().forward(query, key, value, attention_mask, **kwargs)


def zigzag(rank: int, length: int) -> torch.Tensor:
    """The places of a line that a cp rank holds."""
    pieces = torch.arange(length).chunk(2 * mpu.get_context_parallel_world_size())
    return torch.cat((pieces[rank], pieces[-1 - rank]))


_BALANCING = {"rows": "seq_aux_loss", "broken": "global_aux_loss"}


def build_config(case: Case, parallel: ParallelConfig) -> TransformerConfig:
    """``gpt``: biases, LayerNorm, no gate; ``qwen``: none, RMSNorm, gate, q and k norms; ``moe``: that with experts."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    is_gpt, options = case.model == "gpt", {}
    if case.model == "moe":
        options = {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 40,
            "moe_router_topk": 3 if "gathered" in case.options else 2,
            "moe_router_dtype": "fp32" if "gathered" in case.options and case.bf16 else None,
            "moe_aux_loss_coeff": 0.02,
            "moe_z_loss_coeff": 0.01,
            "moe_router_load_balancing_type": next(
                (kind for option, kind in _BALANCING.items() if option in case.options), "aux_loss"
            ),
            "moe_shared_expert_intermediate_size": None if "rows" in case.options else 48,
            "moe_layer_freq": [0, 1, 1, 1],
        }
    if "recompute" in case.options:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=8 if is_gpt else 4,
        ffn_hidden_size=136 if is_gpt else 88,
        normalization="LayerNorm" if is_gpt else "RMSNorm",
        qk_layernorm=not is_gpt,
        gated_linear_unit=not is_gpt,
        activation_func=F.gelu if is_gpt else F.silu,
        add_bias_linear=is_gpt,
        add_qkv_bias=is_gpt,
        init_method_std=0.08,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=case.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        overlap_p2p_comm=parallel.num_chunks > 1,
        batch_p2p_comm=parallel.num_chunks == 1,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="allgather" if "gathered" in case.options else "alltoall",
        calculate_per_token_loss="means" not in case.options,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=True,
        **options,
    )


def _specs(case: Case, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    def layer(num_experts: int | None) -> Any:  # noqa: ANN401
        spec = get_gpt_layer_local_spec(
            num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        attention = spec.submodules.self_attention.submodules
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if "packed" in case.options or case.parallel.context_parallel_size > 1:
            attention.core_attention = OwnAttention
        return spec

    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    per_chunk = config.num_layers // (
        config.pipeline_model_parallel_size * (mpu.get_virtual_pipeline_model_parallel_world_size() or 1)
    )
    first = ((vp_stage or 0) * config.pipeline_model_parallel_size + mpu.get_pipeline_model_parallel_rank()) * per_chunk
    experts = [config.num_moe_experts if first + index > 0 else None for index in range(count)]
    return TransformerBlockSubmodules(layer_specs=[layer(number) for number in experts], layer_norm=Norm)


def build_model(case: Case, config: TransformerConfig, num_chunks: int) -> list[DistributedDataParallel]:
    """This rank's chunks, in gradient buffers."""
    chunks = []
    for vp_stage in [None] if num_chunks == 1 else range(num_chunks):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=_specs(case, config, vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=2 * LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights="tied" in case.options,
            position_embedding_type="learned_absolute" if case.model == "gpt" else "rope",
            vp_stage=vp_stage,
        )
        if "broken" in case.options:
            gpt.decoder.layers[0].input_layernorm = OwnNorm(config.hidden_size)
        chunk = Float16Module(config, gpt) if case.bf16 else gpt
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=case.is_distributed)
        chunks.append(DistributedDataParallel(config, buffers, chunk))
    return chunks


def set_weights(model: ObservedModel) -> None:
    """The same numbers in every layout, drawn by name."""
    for item in iterate_parameters(model):
        generator = torch.Generator().manual_seed(SEED + sum(item.spec.name.encode()))
        values = torch.randn(item.spec.global_shape, generator=generator) * 0.08
        values += 1.0 if "norm" in item.spec.name and item.spec.name.endswith("weight") else 0.0
        item.parameter.data.copy_(cut_shard(values, item.spec))


def read_state(model: ObservedModel, *, of_gradients: bool) -> dict[str, tuple[ShardSpec, torch.Tensor]]:
    """This rank's parameters or their main gradients by name, with their places."""
    return {
        item.spec.name: (
            item.spec,
            (main_grad(item.parameter) if of_gradients else item.parameter).detach().clone(),
        )
        for item in iterate_parameters(model)
    }


def make_batch(case: Case, number: int) -> dict[str, torch.Tensor]:
    """Micro-batch ``number`` of the run; some of its tokens do not count."""
    generator = torch.Generator().manual_seed(1000 * SEED + number)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    batch["positions"] = positions
    if "packed" in case.options:
        batch = {name: value.reshape(1, -1) for name, value in batch.items()}
    return {name: value.contiguous() for name, value in batch.items()}


def forward_step(
    case: Case, batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., object]]:
    """The loss of the labels, or the model's hidden states."""
    batch = next(batches)
    packed = None
    if "packed" in case.options:
        bounds = torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)
    batch = get_batch_on_this_cp_rank(batch)
    losses = model(
        input_ids=batch["tokens"],
        position_ids=batch["positions"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=packed,
    )
    return losses, partial(loss_of_mask, batch["mask"])


def loss_of_mask(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum over the tokens that count, their number, and the losses of all."""
    total = (losses.float() * mask).sum()
    return total, mask.sum().int(), whole_lines(losses.detach())


def whole_lines(losses: torch.Tensor) -> torch.Tensor:
    """Puts the cp ranks' slices together."""
    parts = [torch.empty_like(losses) for _ in range(mpu.get_context_parallel_world_size())]
    dist.all_gather(parts, losses.contiguous(), group=mpu.get_context_parallel_group())
    whole = torch.cat(parts, dim=1)
    if len(parts) > 1:
        length = whole.shape[1]
        whole[:, torch.cat([zigzag(rank, length) for rank in range(len(parts))])] = whole.clone()
    return whole


def train(case: Case, folder: Path, *, follows: bool) -> None:
    """Two updates of four micro-batches in all. Every rank must call it."""
    parallel = ParallelConfig() if follows else case.parallel
    ranks: ModelRanks = build_layout(parallel, seed=SEED)
    if case.model == "moe":
        define_router_gemm()
    config = build_config(case, parallel)
    model = build_model(case, config, parallel.num_chunks)
    observed = ObservedModel(chunks=model, ranks=ranks, vocab_size=VOCABULARY, num_replicas=parallel.data_parallel_size)
    set_weights(observed)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.1,
        clip_grad=0.3,
        bf16=case.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=case.is_distributed,
    )
    optimizer = get_megatron_optimizer(adam, model)
    observed = ObservedModel(
        chunks=model, ranks=ranks, vocab_size=VOCABULARY, num_replicas=parallel.data_parallel_size, optimizer=optimizer
    )
    order: TrainingOrder = follow(observed, OrderConfig(emulate=case.parallel if follows else None))
    config.grad_scale_func = optimizer.scale_loss
    result: dict[str, Any] = {"place": (ranks.dp_rank, ranks.dp_size), "updates": []}
    for update in range(UPDATES):
        numbers = range(ranks.dp_rank, MICRO_BATCHES, ranks.dp_size)
        batches = [make_batch(case, update * MICRO_BATCHES + number) for number in numbers]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        num_lines, length = batches[0]["tokens"].shape
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, case),
            data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=num_lines,
            forward_only=False,
        )
        order.before_step()
        gradient = {} if case.is_distributed else read_state(observed, of_gradients=True)
        _, norm, _ = optimizer.step()
        observed.gather_parameters()
        result["updates"].append(
            {
                "losses": dict(zip(numbers, losses, strict=True)) if losses else {},
                "norm": norm,
                "gradients": gradient,
                "parameters": read_state(observed, of_gradients=False),
            }
        )
    result["not_followed"] = order.facts.not_followed
    torch.save(result, folder / f"{dist.get_rank()}.pt")
    dist.barrier()


@contextmanager
def reversed_ranks() -> Iterator[None]:
    """Sums over ranks begin with the last."""
    in_order, owners = parts.ordered_sum, (parts, arithmetic, cross_entropy, gradients)
    for owner in owners:
        vars(owner)["ordered_sum"] = lambda items: in_order(items[::-1])
    try:
        yield
    finally:
        for owner in owners:
            vars(owner)["ordered_sum"] = in_order


@contextmanager
def replicas_in_blocks() -> Iterator[None]:
    """The first of two replicas gets the first two of four micro-batches."""
    begin, numbers = Engine.begin_round, count()
    Engine.begin_round = lambda self, number: begin(self, next(numbers) // 2 % 2)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.begin_round = begin  # type: ignore[method-assign]


@contextmanager
def added_at_once() -> Iterator[None]:
    """One rank adds the outputs of all experts of a token."""
    emulate = vars(experts)["_emulate_gathering"]
    vars(experts)["_emulate_gathering"] = lambda dispatcher, modules: None
    try:
        yield
    finally:
        vars(experts)["_emulate_gathering"] = emulate


@contextmanager
def sliced_otherwise() -> Iterator[None]:
    """A cp rank holds its piece of the first half of a line, and the same of the second half."""
    start = Engine.__init__
    Engine.__init__ = lambda self, plan, **unused: start(self, plan, blocks=2)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.__init__ = start  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "reversed": reversed_ranks,
    "in-blocks": replicas_in_blocks,
    "at-once": added_at_once,
    "sliced-otherwise": sliced_otherwise,
}


def main() -> None:
    """All cases named on the command line, in order."""
    root = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    join_group()
    follows = os.environ.get("WORLD_SIZE", "1") == "1"
    for name in sys.argv[2:]:
        fault, _, case_name = name.rpartition(":")
        case = Case.parse(case_name)
        folder = root / fault / case_name
        folder.mkdir(parents=True, exist_ok=True)
        ordered = OrderConfig(ordered_reductions=case.parallel.world_size > 2)
        with FAULTS[fault](), use_ordered_reductions(ordered):
            try:
                train(case, folder, follows=follows)
            except LayoutError as error:
                (folder / REFUSAL).write_text(str(error), encoding="utf-8")
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
