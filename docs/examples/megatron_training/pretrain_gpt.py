"""Pre-trains a small GPT with Megatron-LM's own training loop on its own mock data.

``torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2``: every argument is Megatron's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
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
    """Runs one micro-batch: the first stage sees its tokens, the last one its labels."""
    batch = next(rows)
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


def compute_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sums the losses of a micro-batch, as Megatron-LM's ``pretrain_gpt.py`` does."""
    total = torch.sum(losses.view(-1).float() * mask.view(-1).float())
    count = mask.sum().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def main(arguments: Sequence[str]) -> None:
    """Trains with Megatron's arguments behind those of a small model."""
    run_megatron_training_on_host()
    sys.argv[1:] = [*SMALL_GPT, *HOST_ARGUMENTS, *arguments]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    megatron.attach_to_pretrain()  # the one line of the instruments
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, step_forward)


if __name__ == "__main__":  # saving a checkpoint starts processes
    main(sys.argv[1:])
