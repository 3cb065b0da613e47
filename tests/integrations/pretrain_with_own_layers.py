"""The example's training with layers that the wheel does not have on a CPU: norms under sequence parallelism and
attention under context parallelism, both of this project's pipeline. With them, every layout that is known to compute
wrong values runs in Megatron-LM's own loop.

Two arguments of its own: ``--cross-stages`` sets the communication that ``megatron.training`` refuses among its
arguments, and does not see in a configuration; ``--with-biases`` is a model with biases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from mock_scheduler import megatron
from pipelines.megatron.layers.attention import RowAttention
from pipelines.megatron.layers.repairs import TorchNorm, repair_layers

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/examples/megatron_training"))

from megatron_on_host import HOST_ARGUMENTS, run_megatron_training_on_host
from pretrain_gpt import SMALL_GPT, compute_loss, provide_datasets

CROSS_STAGES, WITH_BIASES = "--cross-stages", "--with-biases"


def build_layer_specs(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Builds Megatron's local layers with this project's norms and attention."""
    block = get_gpt_decoder_block_spec(
        config.transformer,
        use_transformer_engine=False,
        normalization=config.transformer.normalization,
        vp_stage=vp_stage,
    )
    specs = []
    for spec in block.layer_specs:
        attention = spec.submodules.self_attention
        submodules = replace(
            spec.submodules,
            input_layernorm=TorchNorm,
            pre_mlp_layernorm=TorchNorm,
            self_attention=replace(attention, submodules=replace(attention.submodules, core_attention=RowAttention)),
        )
        specs.append(replace(spec, submodules=submodules))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchNorm)


def repair_chunks(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Lets an expert's second bias be added, which autograd refuses in 0.19.2 as well."""
    for chunk in chunks:
        repair_layers(chunk)
    return chunks


def step_forward(rows: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Runs one micro-batch, of which each cp rank has its part."""
    batch = next(rows)
    cp_size = get_args().context_parallel_size
    if cp_size > 1:
        batch = get_batch_on_this_cp_rank(batch, False, cp_group=parallel_state.get_context_parallel_group())
        batch["attention_mask"] = _in_gathered_order(batch["attention_mask"], cp_size)
    is_first = get_attr_wrapped_model(model, "pre_process")
    is_last = get_attr_wrapped_model(model, "post_process")
    output = model(
        batch["tokens"] if is_first else None,
        batch["position_ids"] if is_first else None,
        batch["attention_mask"],
        labels=batch["labels"] if is_last else None,
        loss_mask=batch["loss_mask"] if is_last else None,
    )
    return output, partial(compute_loss, batch["loss_mask"])


def _in_gathered_order(mask: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Orders the keys of a mask ``[b, 1, sq, sk]`` as the cp ranks hold them: each has two parts of a row."""
    parts = mask.chunk(2 * cp_size, dim=3)
    order = [part for cp_rank in range(cp_size) for part in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    return torch.cat([parts[part] for part in order], dim=3)


def main(arguments: Sequence[str]) -> None:
    """Trains with Megatron's arguments behind those of a small model."""
    run_megatron_training_on_host()
    model_arguments = [item for item in SMALL_GPT if WITH_BIASES not in arguments or item != "--disable-bias-linear"]
    own = (CROSS_STAGES, WITH_BIASES)
    sys.argv[1:] = [*model_arguments, *HOST_ARGUMENTS, *(item for item in arguments if item not in own)]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = build_layer_specs
    model.pre_wrap_hooks = [repair_chunks]
    if CROSS_STAGES in arguments:
        model.transformer.overlap_p2p_comm, model.transformer.batch_p2p_comm = False, True
    megatron.attach_to_pretrain()
    pretrain(
        pretrain_cfg_container_from_args(args, model), provide_datasets, ModelType.encoder_or_decoder, step_forward
    )


if __name__ == "__main__":
    main(sys.argv[1:])
