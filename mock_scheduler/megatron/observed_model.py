"""Describes a model under training to the instruments: chunks, optimizer and ranks, whoever built them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError, LayoutError
from mock_scheduler.megatron.ranks import ModelRanks, read_ranks


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """The ``GPTModel`` inside its wrappers, whatever they are; of a vision-language model the language model.

    Raises:
        ConfigError: there is none, or more than one.
    """
    return _language_model(strip_wrappers(chunk))[1]


def strip_wrappers(chunk: torch.nn.Module) -> torch.nn.Module:
    """A chunk without the wrappers that hold it as ``module``, as ``DistributedDataParallel`` and ``Float16Module``."""
    inner = chunk
    while not isinstance(inner, GPTModel) and isinstance(inner._modules.get("module"), torch.nn.Module):
        inner = inner.get_submodule("module")
    return inner


def language_model_path(chunk: torch.nn.Module) -> str:
    """Where the ``GPTModel`` is within a chunk without its wrappers, as ``language_model.``; empty where it is all."""
    path = _language_model(strip_wrappers(chunk))[0]
    return f"{path}." if path else ""


def _language_model(model: torch.nn.Module) -> tuple[str, GPTModel]:
    if isinstance(model, GPTModel):
        return "", model
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, GPTModel)]
    if len(found) != 1:
        inside = "no GPTModel is" if not found else f"{len(found)} GPTModels are"
        raise ConfigError(
            f"{inside} in a model chunk of type {type(model).__name__}; expected one of Megatron-core's in each. "
            "Hybrid (Mamba), BERT and T5 models cannot be followed; attach to the chunks of a GPTModel"
        )
    return found[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObservedModel:
    """Holds this rank's part of one model.

    chunks: its model chunks in the order of Megatron's list, in ``DistributedDataParallel`` where they are trained.
    optimizer: Megatron's, ``None`` of a model that is never trained. prefix: the beginning of canonical names, as
    ``critic.``. vocab_size: without padding. num_replicas: the ranks whose gradients of a parameter's part are summed,
    dp × cp; those of the emulated layout where one process follows another.
    """

    chunks: Sequence[torch.nn.Module]
    ranks: ModelRanks
    vocab_size: int
    num_replicas: int
    optimizer: MegatronOptimizer | None = None
    prefix: str = ""

    @property
    def config(self) -> TransformerConfig:
        """Returns Megatron's configuration of the model."""
        return unwrapped(self.chunks[0]).config

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """Returns Megatron's optimizers one by one, whether it chained several or not."""
        if self.optimizer is None:
            return []
        is_chained = isinstance(self.optimizer, ChainedOptimizer)
        return list(self.optimizer.chained_optimizers) if is_chained else [self.optimizer]

    def gpts(self) -> Iterator[GPTModel]:
        """Yields the ``GPTModel`` of each chunk."""
        yield from map(unwrapped, self.chunks)

    def gather_parameters(self) -> None:
        """Makes this rank's parameters current, where their gathering would wait for the next forward pass."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def observe_model(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    *,
    vocab_size: int | None = None,
    prefix: str = "",
) -> ObservedModel:
    """Reads a model that somebody else has built: its place in the layout, and how many ranks' gradients are summed.

    Args:
        model_chunks: Megatron's list, or the one chunk.
        optimizer: as ``get_megatron_optimizer`` gives it.
        vocab_size: without padding; else the model's own size counts.
        prefix: the beginning of canonical names.

    Raises:
        ConfigError: something of it cannot be followed.
        LayoutError: neither the model nor ``parallel_state`` has the process groups.
    """
    chunks = (model_chunks,) if isinstance(model_chunks, torch.nn.Module) else tuple(model_chunks)
    if not chunks:
        raise ConfigError("attach got no model chunk; expected Megatron's list of chunks, or the one chunk")
    gpt = unwrapped(chunks[0])
    wrapper = next((chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)), None)
    ranks = read_ranks(
        device=next(strip_wrappers(chunks[0]).parameters()).device,
        num_chunks=len(chunks),
        groups=vars(gpt).get("pg_collection"),
        dp_group=None if wrapper is None else wrapper.dp_group,
    )
    if gpt.config.num_moe_experts is None:  # Megatron's etp is tp where nobody sets it
        ranks = replace(ranks, ep_rank=0, ep_size=1, etp_rank=0, etp_size=1)
    return ObservedModel(
        chunks=chunks,
        optimizer=optimizer,
        ranks=ranks,
        vocab_size=vocab_size or int(gpt.vocab_size),
        num_replicas=ranks.dp_size * ranks.cp_size,
        prefix=prefix,
    )


def layout_of(model: ObservedModel) -> ParallelConfig:
    """The layout that a built model is in; ``observe_model`` gives one without experts no degrees of them."""
    ranks = model.ranks
    return ParallelConfig(
        tensor_model_parallel_size=ranks.tp_size,
        pipeline_model_parallel_size=ranks.pp_size,
        virtual_pipeline_model_parallel_size=ranks.num_chunks if ranks.num_chunks > 1 else None,
        context_parallel_size=ranks.cp_size,
        expert_model_parallel_size=ranks.ep_size,
        expert_tensor_parallel_size=ranks.etp_size,
        data_parallel_size=ranks.dp_size,
        sequence_parallel=bool(model.config.sequence_parallel),
    )


def check_layout(found: ParallelConfig, asked: ParallelConfig | None) -> None:
    """Refuses a training in another layout than the run file's.

    Raises:
        LayoutError: with both.
    """
    if asked is not None and asked.describe() != found.describe():
        raise LayoutError(
            f"the training runs in layout {found.describe_in_full()}; expected {asked.describe_in_full()}, as the run "
            "file says. Check what the command makes of the layout's arguments"
        )
