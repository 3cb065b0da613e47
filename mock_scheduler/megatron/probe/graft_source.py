"""Reads the tensors of a reference's trace that a run is to get, and cuts each rank's part out of them.

Every rank reads them; nothing is communicated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mock_scheduler.config.instruments import GraftConfig, TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.probe.observed import ObservedOutput
from mock_scheduler.megatron.probe.shares import Places, ShareBook, TokenIndex, Tokens
from mock_scheduler.megatron.step_tokens import MetRows
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.support.text import bullet_list, in_words, list_some
from mock_scheduler.trace.entries import RowTable, TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.shards import cut_shard

#: The kinds that a module's output is traced as.
_VALUE_KINDS: tuple[TraceKind, ...] = ("activation", "router", "logits")
_NUM_NEAREST = 3
_NUM_ROWS = 3


class GraftSource:
    """The tensors of a reference's trace that a run is to get.

    Raises ``TraceError`` where the trace cannot be read or lacks a named tensor at that step and update; lists all.
    """

    def __init__(self, config: GraftConfig) -> None:
        if config.trace_dir is None:
            raise TraceError("graft.trace_dir is not set, so there is nothing to graft")
        self.config = config
        self._trace_dir = Path(config.trace_dir)
        self._where = f"step {config.step} of {self._trace_dir}"
        with open_trace(self._trace_dir) as reader:
            self._keys = self._find(reader)

    def index(self, rows: MetRows) -> TokenIndex:
        """Makes the index of rows in the trace's own order of tokens, for rows that forward passes meet."""
        with open_trace(self._trace_dir) as reader:
            return _ReferenceIndex(rows, reader.footer(self.config.step).rows, self._where)

    def order(self, batch: RowTable) -> torch.Tensor | None:
        """Finds each token of the batch among the trace's, int64 ``[T]``; ``None`` where both are alike.

        Raises:
            TraceError: a row of the batch is not in the trace, or is of another length there.
        """
        with open_trace(self._trace_dir) as reader:
            rows = reader.footer(self.config.step).rows
        if batch.identities == rows.identities and batch.lengths == rows.lengths:
            return None
        starts = _find_rows(batch.identities, batch.lengths, rows, self._where)
        return torch.cat([torch.arange(at, at + length) for at, length in zip(starts, batch.lengths, strict=True)])

    def load(self, output: ObservedOutput, order: torch.Tensor | None, num_tokens: int) -> Reference:
        """Returns a named tensor, in the order of the batch's tokens.

        Raises:
            TraceError: it has another shape than the model's.
        """
        key = self._keys[output.name]
        if not output.row.has_gradient:
            raise TraceError(
                f"graft: {output.name} is a choice of experts, which cannot be put in: graft the router's logits"
            )
        with open_trace(self._trace_dir) as reader:
            shape = reader.dtype_and_shape(key)[1]
            if shape[1:] != output.form.shape:
                raise TraceError(
                    f"graft: the {key.describe()} is {list(shape[1:])} for each token in {self._trace_dir}, and "
                    f"{list(output.form.shape)} in this model"
                )
            merged = reader.merge(key)
            tensor, present = merged.tensor.clone(), merged.present
        has_token = torch.ones(len(tensor), dtype=torch.bool) if present is None else present.reshape(len(tensor), -1)
        has_token = has_token if has_token.dim() == 1 else has_token.all(dim=1)
        if order is not None:
            tensor, has_token = tensor[order], has_token[order]
        assert len(tensor) == num_tokens  # of the same rows
        return Reference(key=key, tensor=tensor, has_token=has_token, trace_dir=self._trace_dir)

    def choice(self, name: str, order: torch.Tensor | None) -> torch.Tensor:
        """Returns int64 ``[T, K]``: the experts that the reference's tokens chose, in the order of the batch's tokens.

        Raises:
            TraceError: the trace does not have them.
        """
        key = TraceKey(step=self.config.step, update=self.config.update, kind="router", name=name)
        with open_trace(self._trace_dir) as reader:
            if not reader.has(key):
                raise TraceError(
                    f"graft: {self._trace_dir} has no {key.describe()}, without which what lies by chosen expert "
                    "cannot be put in: trace it as well"
                )
            chosen = reader.merge(key).tensor.clone()
        return chosen if order is None else chosen[order]

    def _find(self, reader: TraceReader) -> dict[str, TraceKey]:
        config = self.config
        if config.step not in reader.steps:
            steps = list_some([str(step) for step in reader.steps], _NUM_NEAREST, ", ")
            raise TraceError(f"graft.step {config.step} is not in {self._trace_dir}, which has steps {steps}")
        kinds = _VALUE_KINDS if config.kind == "activation" else ("activation_gradient",)
        keys = [key for key in reader.keys(config.step) if key.kind in kinds and key.update == config.update]
        found = {key.name: key for key in keys}
        problems = [
            f"{name}{_describe_nearest(name, found)}" for name in dict.fromkeys(config.names) if name not in found
        ]
        if problems:
            raise TraceError(
                f"graft.names: {self._trace_dir} has no {in_words(config.kind)} at step {config.step}, update "
                f"{config.update}, of:{bullet_list(problems)}"
            )
        return {name: found[name] for name in dict.fromkeys(config.names)}


class _ReferenceIndex(TokenIndex):
    """The indices of met rows among a reference's tokens; ``where``: of these, for messages."""

    def __init__(self, rows: MetRows, reference: RowTable, where: str) -> None:
        super().__init__(reference.lengths)
        self._rows, self._reference, self._where = rows, reference, where

    def first_places(self) -> Places:
        """Finds the rows' starts; raises ``TraceError`` where the reference lacks a row or has it of another length."""
        starts = _find_rows(self._rows.identities, self._rows.lengths, self._reference, self._where)
        return np.asarray(starts, dtype=np.int64)


def _find_rows(identities: Sequence[str], lengths: Sequence[int], reference: RowTable, where: str) -> list[int]:
    """Finds the place of each row's first token in the reference.

    Raises:
        TraceError: a row is not there, or is of another length there.
    """
    places = zip(reference.first_places, reference.lengths, strict=True)
    known = dict(zip(reference.identities, places, strict=True))
    problems = []
    for identity, length in zip(identities, lengths, strict=True):
        if identity not in known:
            problems.append(f"{identity} is not there")
        elif known[identity][1] != length:
            problems.append(f"{identity} has {length} tokens here, {known[identity][1]} there")
    if problems:
        raise TraceError(
            f"graft: the batch is not that of {where}: {len(problems)} of {len(identities)} rows are others: "
            f"{list_some(problems, _NUM_ROWS, '; ')}"
        )
    return [known[identity][0] for identity in identities]


class Reference:
    """One tensor ``[T, ...]`` of the reference, on the host; ``has_token``: bool ``[T]``."""

    def __init__(self, *, key: TraceKey, tensor: torch.Tensor, has_token: torch.Tensor, trace_dir: Path) -> None:
        self._key = key
        self._tensor = tensor
        self._has_token = has_token
        self._trace_dir = trace_dir
        self._cut: dict[int, torch.Tensor] = {}

    def cut(self, book: ShareBook, output: ObservedOutput, tokens: Tokens, like: torch.Tensor) -> torch.Tensor:
        """The rank's part of it for these tokens; ``like``: the tensor that it goes into.

        Raises:
            TraceError: it is of another dtype, or has no value for a token.
        """
        if self._tensor.dtype != like.dtype:
            raise TraceError(
                f"graft: the {self._key.describe()} is {dtype_name(self._tensor.dtype)} in {self._trace_dir}, and "
                f"{dtype_name(like.dtype)} in this run: a graft must have its bits"
            )
        if id(tokens) not in self._cut:
            blocks = tokens.split.blocks
            num_absent = sum(
                int((~self._has_token[block.global_start : block.global_start + block.length]).sum())
                for block in blocks
            )
            if num_absent:
                raise TraceError(
                    f"graft: {self._trace_dir} has no {self._key.describe()} for {num_absent} of {len(tokens.places)} "
                    "tokens of a micro-batch: its update trained on other rows, or some of its ranks wrote no trace"
                )
            local = cut_shard(self._tensor, book.spec(output, tokens))
            self._cut[id(tokens)] = local.to(like.device)
        return self._cut[id(tokens)]


def _describe_nearest(name: str, found: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, sorted(found), n=_NUM_NEAREST, cutoff=0.5)
    return f" (nearest: {', '.join(nearest)})" if nearest else ""
