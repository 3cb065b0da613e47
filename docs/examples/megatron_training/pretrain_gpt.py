"""Pre-trains a small GPT with Megatron-LM's own training loop on its own mock data.

``torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2``: all arguments but two are Megatron's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from host_layers import build_layer_specs
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron_on_host import HOST_ARGUMENTS, run_megatron_training_on_host

from mock_scheduler import megatron

SMALL_GPT = (
    *("--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "128", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--make-vocab-size-divisible-by", "8"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "3", "--seed", "1234"),
    *("--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--log-interval", "1"),
    *("--split", "98,1,1", "--eval-iters", "0", "--eval-interval", "1000", "--num-workers", "0"),
)


def provide_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:  # noqa: ANN401
    """Builds Megatron's mock data sets: train, validation, test."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        path_to_cache=args.data_cache_path,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


provide_datasets.is_distributed = True  # every rank reads its own rows


def step_forward(rows: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Runs one micro-batch: the first stage sees its tokens, the last one its labels, a cp rank its part of them."""
    batch, packed = next(rows), None
    if get_args().pack_rows:
        batch, packed = pack_rows(batch)
    elif parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch, False, cp_group=parallel_state.get_context_parallel_group())
    is_first = get_attr_wrapped_model(model, "pre_process")
    is_last = get_attr_wrapped_model(model, "post_process")
    output = model(
        batch["tokens"] if is_first else None,
        batch["position_ids"] if is_first else None,
        batch["attention_mask"],
        labels=batch["labels"] if is_last else None,
        loss_mask=batch["loss_mask"] if is_last else None,
        packed_seq_params=packed,
    )
    return output, partial(compute_loss, batch["loss_mask"])


def pack_rows(batch: dict[str, torch.Tensor]) -> tuple[dict[str, Any], PackedSeqParams]:
    """Lays the rows of a micro-batch in one line."""
    num_rows, length = batch["tokens"].shape
    bounds = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32)
    line: dict[str, Any] = {name: values.reshape(1, -1) for name, values in batch.items()}
    line["attention_mask"] = None
    return line, PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)


def compute_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sums the losses of a micro-batch, as Megatron-LM's ``pretrain_gpt.py`` does."""
    total = torch.sum(losses.view(-1).float() * mask.view(-1).float())
    count = mask.sum().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the example's own arguments to Megatron's."""
    group = parser.add_argument_group("example")
    group.add_argument("--host-layers", action="store_true", help="layers for sp, cp and packed rows on the CPU")
    group.add_argument("--pack-rows", action="store_true", help="all rows of a micro-batch in one line")
    return parser


def main(
    arguments: Sequence[str],
    *,
    small: Sequence[str] = SMALL_GPT,
    add: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] = add_arguments,
    change: Callable[[Any, argparse.Namespace], None] | None = None,
) -> None:
    """Trains with Megatron's arguments behind those of a small model; ``change`` changes the model's configuration."""
    run_megatron_training_on_host()
    sys.argv[1:] = [*small, *HOST_ARGUMENTS, *arguments]
    args = parse_and_validate_args(add)
    model = gpt_config_from_args(args)
    if args.host_layers:
        model.transformer_layer_spec = build_layer_specs
    if change is not None:
        change(model, args)
    config = pretrain_cfg_container_from_args(args, model)
    megatron.attach_to_pretrain()  # the one line of the instruments
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, step_forward)


if __name__ == "__main__":  # saving a checkpoint starts processes
    main(sys.argv[1:])
