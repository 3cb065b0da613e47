"""Finds a module's outputs among a step's tokens, place by place, on one rank; probes and grafts address tensors by it.

Contract: nothing is communicated or computed with the values themselves; a micro-batch's share is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np
import torch
from numpy.typing import NDArray

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.forms import OutputForm
from mock_scheduler.megatron.probe.observed import ObservedOutput
from mock_scheduler.megatron.probe.watches import Gather
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MetRows, MicroBatchTokens
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, RowTable
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices

Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPlaces:
    """Holds some tokens of a share, without padding.

    cells: int64 ``[n]`` on the host, their places in the flattened ``[b · s]`` lines of the share. split: their places
    in the token dimension of a canonical tensor whose local one has just these n tokens, in this order.
    """

    cells: torch.Tensor
    split: Split

    @property
    def num_tokens(self) -> int:
        """Returns n."""
        return len(self.cells)


class TokenIndex:
    """The canonical indices of a step's tokens. lengths: the tokens of each row of the batch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.num_tokens = sum(lengths)
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])

    def first_places(self) -> Places:
        """Returns int64 ``[R]``: the canonical index of each row's first token."""
        return self._starts

    def places(
        self, own: MicroBatchTokens, *, columns: slice = slice(None), response_only: bool = False
    ) -> TokenPlaces:
        """Returns the share's tokens, in canonical order.

        columns: of the share's s columns only these, as sequence parallelism splits them; cells are then those of
        the flattened ``[b · len(columns)]``. response_only: only tokens whose target is a response token.
        """
        row_ids, positions = own.row_ids[:, columns].cpu().numpy(), own.positions[:, columns].cpu().numpy()
        is_kept = row_ids >= 0
        if response_only:
            is_kept &= own.response_mask[:, columns].cpu().numpy()
        cells = np.flatnonzero(is_kept)
        indices = self.first_places()[row_ids.ravel()[cells]] + positions.ravel()[cells]
        order = np.argsort(indices, kind="stable")
        blocks: tuple[Block, ...] = blocks_of_indices(indices[order].tolist())
        return TokenPlaces(cells=torch.from_numpy(cells[order]), split=Split(dim=0, blocks=blocks))


class MetTokenIndex(TokenIndex):
    """The canonical indices of rows that forward passes meet one by one; they follow from the rows' identities."""

    def __init__(self, rows: MetRows) -> None:
        self.num_tokens = VIRTUAL_TOKENS
        self._rows = rows

    def first_places(self) -> Places:
        """Returns the starts of the rows met so far."""
        return np.asarray(self._rows.starts, dtype=np.int64)


def token_index(rows: RowTable | MetRows) -> TokenIndex:
    """Makes the index of a step's rows."""
    return MetTokenIndex(rows) if isinstance(rows, MetRows) else TokenIndex(rows.lengths)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The tokens of a share that a module computes.

    num_places: s · b of its output, padding included. places: int64 ``[n]`` on the compute device, the tokens among
    them. span: the same as a range where they lie one after another, as those of one row do. split: where these n go
    in the token dimension.
    """

    num_places: int
    places: torch.Tensor
    span: slice | None
    split: Split


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """A micro-batch's share: all of its columns, and the slice of them that sequence parallelism leaves this rank."""

    whole: Tokens
    slice: Tokens

    def of(self, form: OutputForm) -> Tokens:
        """Returns the tokens of an output of this form."""
        return self.slice if form.is_sliced else self.whole


class ShareBook:
    """The shares of a rank's micro-batches in one step, by their index; ``num_tokens``: of the step."""

    def __init__(self, ranks: ModelRanks, index: TokenIndex) -> None:
        self.num_tokens = index.num_tokens
        self._ranks = ranks
        self._index = index
        self._shares: dict[int, Share] = {}

    def share(self, own: MicroBatchTokens) -> Share:
        """Returns that of one micro-batch."""
        index = own.index
        if index not in self._shares:
            width = own.row_ids.shape[1] // self._ranks.tp_size
            start = self._ranks.tp_rank * width
            whole = self._tokens(own, slice(None))
            part = whole if self._ranks.tp_size == 1 else self._tokens(own, slice(start, start + width))
            self._shares[index] = Share(whole=whole, slice=part)
        return self._shares[index]

    def spec(self, output: ObservedOutput, tokens: Tokens) -> ShardSpec:
        """How the tensor of an output's tokens, ``[n, *form.local_shape]``, lies in the whole one."""
        form = output.form
        return ShardSpec(
            name=output.name,
            global_shape=(self.num_tokens, *form.shape),
            local_shape=(len(tokens.places), *form.local_shape),
            splits=(tokens.split, *form.splits),
        )

    def _tokens(self, own: MicroBatchTokens, columns: slice) -> Tokens:
        places = self._index.places(own, columns=columns)
        num_lines, width = own.row_ids[:, columns].shape
        # Lines lie one after another there; modules give the columns one after another.
        of_output = places.cells % width * num_lines + places.cells // width
        return Tokens(
            num_places=num_lines * width,
            places=of_output.to(own.row_ids.device),
            span=_span(of_output),
            split=places.split,
        )


def select_tokens(
    output: ObservedOutput, tensor: torch.Tensor, gather: Gather | None, tokens: Tokens
) -> torch.Tensor | None:
    """Selects an output's values for a share's tokens, ``[n, *form.local_shape]``, or its gradient's.

    ``None`` where there are none: all padding, or a rank with none of the features. Elements are chosen, never computed
    with. Raises ``TraceError`` where the output is of another size than the tables say.
    """
    form, num_tokens = output.form, len(tokens.places)
    size = prod(form.local_shape)
    if not num_tokens or not size:
        return None
    local = _by_token(output, tensor, tokens) if gather is None else gather(tensor, tokens.places)
    return local.reshape(num_tokens, -1)[:, :size].reshape(num_tokens, *form.local_shape)


def element_places(
    output: ObservedOutput, tensor: torch.Tensor, gather: Gather | None, tokens: Tokens
) -> torch.Tensor | None:
    """Where the elements of ``select_tokens`` lie in the flattened tensor: int64 of the same shape; -1: nowhere."""
    # From 1 on, since a gather fills slots that no expert was chosen for with 0.
    numbered = torch.arange(1, tensor.numel() + 1, device=tensor.device).view(tensor.shape)
    places = select_tokens(output, numbered, gather, tokens)
    return None if places is None else places - 1


def gradient_scale(model: ObservedModel) -> float:
    """Returns the factor that makes a rank's gradients parts of one sum over all ranks, as ``DistributedDataParallel``
    has it.

    It divides by dp · cp where each rank's loss is a mean, over its own micro-batches (megatron-core 0.16.1,
    ``gradient_scaling_factor``).
    """
    if model.config.calculate_per_token_loss:
        return 1.0
    return 1.0 / model.num_replicas


def _by_token(output: ObservedOutput, tensor: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The tokens of an output that has so many numbers for each of its places, ``[n, width]``."""
    expected = tokens.num_places * output.form.width
    # Leading dimensions count places: a slice of the columns with all features has as many elements as all columns with
    # a slice of the features.
    if tensor.numel() != expected or tokens.num_places not in accumulate(tensor.shape, mul):
        raise TraceError(
            f"{output.name}: the module computed {list(tensor.shape)}; expected {output.form.width} numbers for each "
            f"of {tokens.num_places} places"
        )
    by_place = tensor.reshape(-1, output.form.width)
    # A range is read where it lies; places are gathered into a copy.
    return by_place[tokens.places] if tokens.span is None else by_place[tokens.span]


def _span(places: torch.Tensor) -> slice | None:
    """Gives places on the host as a range; ``None`` where they are none."""
    if not len(places) or not bool((places.diff() == 1).all()):
        return None
    return slice(int(places[0]), int(places[-1]) + 1)
