"""What four ranks run for the tests of layers with experts: ``-m tests.dist.workers.experts_worker FOLDER``.

For each case every rank writes ``FOLDER/{case}/{rank}.safetensors``: gradients of one update by canonical name (this
rank's part), expert biases, the routers' sums over all ranks and, with ``steps``, the parameters after Adam's first
step. Nothing is judged here; the test compares the files with plain torch.
"""

from __future__ import annotations

from typing import Any

import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import save_file

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.launch.process_group import join_process_group
from pipelines.config.model import ModelConfig
from pipelines.megatron.layers.router_ledger import all_reduce_router_sums
from pipelines.megatron.layers.expert_router import attach_router_ledger
from pipelines.megatron.layers.experts import expert_mlp_spec, moe_config_fields, padding_mask_argument
from mock_scheduler.megatron.full_precision import prepare_optimizer
from mock_scheduler.megatron.host_device import use_host_device
from pipelines.megatron.layers.repairs import TorchNorm
from pipelines.megatron.process_of_rank import COLLECTIVE_TIMEOUT, leave_layout

HIDDEN, EXPERTS, LENGTH, VOCAB = 8, 4, 8, 16
LEARNING_RATE = 1e-2
Lines = tuple[list[tuple[int, ...]], ...]
# Lengths of the rows in each line of each micro-batch; what is left of a line of 8 is padding.
LINES: Lines = ([(5,), (3, 4)], [(8,), (2,)], [(6,), (1, 7)], [(4,), ()])
FULL_LINES: Lines = ([(8,), (3, 5)], [(8,), (2, 6)], [(6, 2), (1, 7)], [(4, 4), (8,)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layout and a model. ``is_gpt``: a whole model, else layers alone. ``steps``: with Adam."""

    layout: str
    keys: dict[str, object] = field(default_factory=dict)
    is_gpt: bool = False
    is_padded: bool = True
    recomputes: bool = False
    steps: bool = False

    @property
    def model(self) -> ModelConfig:
        """Both layers have experts, or the second of a whole model."""
        keys = {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 12,
            "num_moe_experts": EXPERTS,
            "moe_layer_freq": [0, 1] if self.is_gpt else 1,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.5,
            "moe_z_loss_coeff": 0.05,
            "moe_shared_expert_intermediate_size": 8,
        }
        return ModelConfig.model_validate(keys | self.keys)

    @property
    def parallel(self) -> ParallelConfig:
        """``tp2-sp-ep2`` as a configuration of four processes."""
        sizes = {axis: int(size) for axis, size in re.findall(r"(tp|cp|ep)(\d)", self.layout)}
        tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
        return ParallelConfig(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            expert_model_parallel_size=sizes.get("ep", 1),
            data_parallel_size=4 // (tp * cp),
            sequence_parallel="-sp" in self.layout,
        )

    @property
    def lines(self) -> Lines:
        """Row lengths by micro-batch and line."""
        return LINES if self.is_padded else FULL_LINES


WHOLE_BATCH: dict[str, object] = {"moe_router_load_balancing_type": "aux_loss"}
BIASED: dict[str, object] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
MEGATRON = WHOLE_BATCH | {"moe_router_impl": "megatron", "moe_aux_loss_coeff": 10.0}
CASES = {
    "ep2": Case(layout="ep2", keys=BIASED),
    "ep4": Case(layout="ep4", keys=WHOLE_BATCH),
    "tp2-sp-ep2": Case(layout="tp2-sp-ep2"),
    "tp2-sp-ep2 aux_loss": Case(layout="tp2-sp-ep2", keys=WHOLE_BATCH | BIASED),
    "cp2-ep2": Case(layout="cp2-ep2"),
    "cp2-ep2 aux_loss": Case(layout="cp2-ep2", keys=WHOLE_BATCH),
    "ep2 after Adam": Case(layout="ep2", steps=True),
    "megatron ep2": Case(layout="ep2", keys=MEGATRON, is_padded=False),
    "megatron tp2-sp-ep2": Case(layout="tp2-sp-ep2", keys=MEGATRON, is_padded=False),
    "megatron tp2-sp": Case(layout="tp2-sp", keys=MEGATRON, is_padded=False),
    "gpt": Case(layout="", is_gpt=True),
    "gpt tp2-sp-ep2": Case(layout="tp2-sp-ep2", is_gpt=True, recomputes=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A whole micro-batch of two lines, in ``[s, b]`` order.

    hidden, slopes: float64 ``[s, b, h]``; the main loss is the sum of slopes × output. tokens, row_ids: int64.
    """

    hidden: torch.Tensor
    slopes: torch.Tensor
    tokens: torch.Tensor
    row_ids: torch.Tensor
    num_responses: int


def row_lengths(case: Case) -> list[int]:
    """Of all rows of the step, by row id."""
    return [length for batch in case.lines for line in batch for length in line]


def row_weights(case: Case) -> list[int]:
    """Response tokens of each row: all where Megatron's own weights are to be compared, else about half."""
    return [(length + 1) // 2 if case.is_padded else length for length in row_lengths(case)]


def build_batches(case: Case) -> list[Batch]:
    """The four micro-batches of the step, alike on every rank."""
    generator = torch.Generator().manual_seed(3)
    weights, batches, row = row_weights(case), [], 0
    for lines in case.lines:
        row_ids, first = torch.full((LENGTH, len(lines)), -1), row
        for column, line in enumerate(lines):
            ids = [row + position for position, length in enumerate(line) for _ in range(length)]
            row_ids[: len(ids), column] = torch.tensor(ids, dtype=torch.int64)
            row += len(line)
        shape = (LENGTH, len(lines), HIDDEN)
        # Small, so that the main loss does not hide those of the router.
        slopes = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05
        batch = Batch(
            hidden=torch.randn(shape, generator=generator, dtype=torch.float64) * 2,
            slopes=slopes * (row_ids >= 0).unsqueeze(-1),
            tokens=torch.randint(VOCAB, row_ids.shape, generator=generator),
            row_ids=row_ids,
            num_responses=sum(weights[first:row]),
        )
        batches.append(batch)
    return batches


def own_part(name: str, full: torch.Tensor, *, tp_rank: int, tp_size: int) -> torch.Tensor:
    """What a tp rank holds of a whole parameter or gradient; experts are not split (etp 1)."""
    if tp_size == 1 or "local_experts" in name:
        return full
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])
    if "linear_qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return full.chunk(tp_size)[tp_rank]
    if "linear_proj" in name or "linear_fc2" in name:
        return full.chunk(tp_size, dim=1)[tp_rank]
    return full


def whole_shape(name: str, part: torch.Tensor, tp_size: int) -> torch.Size:
    """The shape of which ``own_part`` makes the part's."""
    for dim in range(part.dim()):
        full = torch.empty([size * tp_size if dim == axis else size for axis, size in enumerate(part.shape)])
        if own_part(name, full, tp_rank=0, tp_size=tp_size).shape == part.shape:
            return full.shape
    return part.shape


def initial_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """float64, by canonical name; norms start near 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
    return 1.0 + values / 4 if "layernorm" in name else values


class ExpertStack(torch.nn.Module):
    """Residual layers with experts and nothing else; names as in ``GPTModel``'s decoder."""

    def __init__(self, config: TransformerConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList()
        for number in range(1, model.num_layers + 1):
            layer = build_module(expert_mlp_spec(model), config=config)
            layer.set_layer_number(number)
            self.layers.append(layer)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[s, b, h]`` and the mask ``[b, s]`` of its tokens."""
        for layer in self.layers:
            hidden = hidden + layer(hidden, padding_mask=mask)[0]
        return hidden


def build_config(case: Case) -> TransformerConfig:
    model, parallel = case.model, case.parallel
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        **moe_config_fields(model, parallel, torch.float64),
        **(recompute if case.recomputes else {}),
    )


def build_gpt(config: TransformerConfig, model: ModelConfig) -> GPTModel:
    specs = [get_gpt_layer_local_spec(normalization="RMSNorm") for _ in model.moe_layers]
    for spec, has_experts in zip(specs, model.moe_layers, strict=True):
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
        if has_experts:
            spec.submodules.mlp = expert_mlp_spec(model)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchNorm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """By canonical name: experts by their number in the model."""
    first = (
        parallel_state.get_expert_model_parallel_rank()
        * EXPERTS
        // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in module.named_parameters():
        yield re.sub(r"local_experts\.(\d+)", lambda match: f"local_experts.{first + int(match[1])}", name), parameter


def main_loss(case: Case, network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """This rank's part of the sum of slopes × output, of its columns or positions of the micro-batch."""
    parallel = case.parallel
    if case.is_gpt:
        return gpt_loss(case, network, batch)
    tp_rank, cp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    position = tp_rank if parallel.sequence_parallel else cp_rank
    count = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    hidden, slopes = (tensor.chunk(count)[position] for tensor in (batch.hidden, batch.slopes))
    row_ids = batch.row_ids.chunk(parallel.context_parallel_size)[cp_rank].T
    # A stack is handed its tokens as a later pipeline stage is: already split.
    mask = padding_mask_argument(
        row_ids, case.model, is_first_chunk=False, sequence_parallel=parallel.sequence_parallel
    )
    return (network(hidden.clone().requires_grad_(), mask if case.is_padded else None) * slopes).sum()


def gpt_loss(case: Case, network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Every tp rank's logits times its columns of fixed slopes."""
    tp_size, tp_rank = case.parallel.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    tokens, row_ids = batch.tokens.T.contiguous(), batch.row_ids.T.contiguous()
    mask = padding_mask_argument(
        row_ids, case.model, is_first_chunk=True, sequence_parallel=case.parallel.sequence_parallel
    )
    positions = torch.arange(LENGTH).expand_as(tokens)
    logits = network(tokens, positions, None, padding_mask=mask)
    slopes = torch.cat((batch.slopes, -batch.slopes), dim=-1).transpose(0, 1)
    return (logits * slopes.chunk(tp_size, dim=-1)[tp_rank]).sum()


def join(parallel: ParallelConfig) -> None:
    """Megatron's groups, made anew in the same process group."""
    if parallel_state.is_initialized():
        leave_layout()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def build_network(case: Case) -> DistributedDataParallel:
    """The module with its initial weights, in float64 gradient buffers."""
    config, tp_size = build_config(case), case.parallel.tensor_model_parallel_size
    module = build_gpt(config, case.model) if case.is_gpt else ExpertStack(config, case.model)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(module):
        full = initial_weight(name, whole_shape(name, parameter, tp_size))
        parameter.data.copy_(own_part(name, full, tp_rank=tp_rank, tp_size=tp_size))
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=case.steps)
    return DistributedDataParallel(config, ddp_config, module)


def run_case(folder: Path, case: Case) -> None:
    """One update's gradients; the dp ranks take micro-batches in turn."""
    join(case.parallel)
    network = build_network(case)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=1e6,  # never reached, but what clips must take float64
        params_dtype=torch.float64,
        use_distributed_optimizer=case.steps,
    )
    prepare_optimizer(torch.float64)
    optimizer = get_megatron_optimizer(optimizer_config, [network]) if case.steps else None
    ledger = attach_router_ledger([network])
    ledger.start_step(torch.tensor(row_weights(case)))
    network.zero_grad_buffer()
    num_tokens = torch.zeros((), dtype=torch.float64)  # Megatron's int would make the division a float32 one
    for batch in build_batches(case)[parallel_state.get_data_parallel_rank() :: case.parallel.data_parallel_size]:
        main_loss(case, network, batch).backward()
        if parallel_state.get_context_parallel_rank() == 0:
            num_tokens += batch.num_responses
    finalize_model_grads([network], num_tokens)
    sums = all_reduce_router_sums(ledger.take(), case.model, device=torch.device("cpu"))
    tensors = {f"load_balancing.{layer}": own.load_balancing for layer, own in sums.items()}
    tensors |= {f"z.{layer}": own.z for layer, own in sums.items()}
    tensors |= {f"tokens_per_expert.{layer}": own.tokens_per_expert for layer, own in sums.items()}
    tensors |= {name: buffer for name, buffer in network.module.named_buffers() if name.endswith("expert_bias")}
    if optimizer is None:
        tensors |= {name: parameter.main_grad for name, parameter in named_parameters(network.module)}
    else:
        optimizer.step()
        tensors |= {name: parameter.data for name, parameter in named_parameters(network.module)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"{dist.get_rank()}.safetensors")


def main() -> None:
    """All cases, in one process group."""
    use_host_device()
    join_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    for name, case in CASES.items():
        run_case(Path(sys.argv[1]) / name, case)
    leave_layout()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
