"""The example's training with what ``megatron.training`` keeps its users from: then every layout that is known to
compute wrong values runs in Megatron-LM's own loop.

``--cross-stages`` sets the communication that ``megatron.training`` refuses among its arguments, and does not see in a
configuration; ``--with-biases`` is a model with biases. Latent attention has no groups of queries. The layer that
predicts further tokens has the example's attention as well, whatever spec the model has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/examples/megatron_training"))

import pretrain_gpt
from host_layers import Attention
from megatron.core.models.backends import LocalSpecProvider

from pipelines.megatron.layers.repairs import repair_layers

CROSS_STAGES, WITH_BIASES, LATENT = "--cross-stages", "--with-biases", "--multi-latent-attention"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds this program's arguments to the example's."""
    for name in (CROSS_STAGES, WITH_BIASES):
        parser.add_argument(name, action="store_true")
    return pretrain_gpt.add_arguments(parser)


def change_model(model: Any, args: argparse.Namespace) -> None:
    """Sets what no argument sets."""
    model.pre_wrap_hooks = [repair_chunks]
    if args.cross_stages:
        model.transformer.overlap_p2p_comm, model.transformer.batch_p2p_comm = False, True


def repair_chunks(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Lets an expert's second bias be added, which autograd refuses in 0.19.2 as well."""
    for chunk in chunks:
        repair_layers(chunk)
    return chunks


def main(arguments: Sequence[str]) -> None:
    """Trains with Megatron's arguments behind those of a small model."""
    LocalSpecProvider.core_attention = lambda self: Attention
    small = " ".join(pretrain_gpt.SMALL_GPT)
    if WITH_BIASES in arguments:
        small = small.replace("--disable-bias-linear", "")
    if LATENT in arguments:
        small = small.replace("--group-query-attention --num-query-groups 2", "")
    pretrain_gpt.main(arguments, small=small.split(), add=add_arguments, change=change_model)


if __name__ == "__main__":
    main(sys.argv[1:])
