"""The core fields of a batch out of a framework's padded tensors.

Contract: the rows are taken in the order given. A value a framework lacks is 0 (logprobs, rewards), the request's
policy version, or ``TERMINATED``. A turn is a run of response tokens; a reward per token belongs to the last turn that
has begun, else to the first one. Where the tokens of a turn have several policy versions, the turn's is the oldest,
and a column has each token's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.padded.fields import NativeFields, raise_problems
from mock_scheduler.adapters.padded.layout import PaddedLayout, RowSpans, find_spans, gather, gather_by_token
from mock_scheduler.batch import SampleIdentity, Termination
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.batch.row_digests import compute_prompt_digests
from mock_scheduler.support.tensor_bytes import shape_text, share_array

_INT32_MAX = 2**31 - 1
_EXPERT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFields:
    """The core tensors of a ``RolloutBatch`` by name, its prompt digests, and where its rows lie in the padded ones.

    ``token_versions``: the policy version of each response token, int32, and ``routed_experts``: those of each token,
    where the framework states them.
    """

    tensors: Mapping[str, torch.Tensor]
    prompt_digests: tuple[str, ...]
    spans: RowSpans
    token_versions: TensorColumn | None
    routed_experts: TensorColumn | None


class CoreReader:
    """Reads the core fields of one batch; ``order``: its row numbers in identity order, with their identities."""

    def __init__(
        self, fields: NativeFields, layout: PaddedLayout, order: list[int], identities: Sequence[SampleIdentity]
    ) -> None:
        self._fields, self._layout, self._order, self._identities = fields, layout, order, identities
        attention = _numbers(fields.framed[layout.attention_mask][0])
        self._spans = find_spans(attention != 0, layout, fields.widths)
        self._lengths: _Integers = self._spans.lengths[order]
        self._offsets: _Integers = np.concatenate([[0], self._lengths.cumsum()])
        self._mask: npt.NDArray[np.bool_] = self._gather(layout.response_mask) != 0

    def read(self, policy_version: int) -> CoreFields:
        """The core fields; raises ``BatchError`` where a value cannot be one, naming rows, columns and remedies."""
        tokens, rollout_logprobs = self._read_tokens(), self._read_rollout_logprobs()
        starts = self._find_turn_starts()
        turn_rows = np.searchsorted(self._offsets, starts, side="right") - 1
        turn_offsets = np.searchsorted(turn_rows, np.arange(len(self._order) + 1))
        prompt_lengths = self._find_prompt_lengths(starts, turn_offsets)
        rewards, turn_rewards = self._read_rewards(starts, turn_offsets)
        versions, by_token = self._read_versions(starts, turn_rows, policy_version)
        tensors = {
            "tokens": share_array(tokens),
            "row_offsets": share_array(self._offsets),
            "response_mask": share_array(self._mask),
            "rollout_logprobs": share_array(rollout_logprobs),
            "turn_offsets": share_array(turn_offsets),
            "turn_rewards": share_array(turn_rewards.astype(np.float32)),
            "policy_versions": share_array(versions),
            "rewards": share_array(rewards.astype(np.float32)),
            "terminations": torch.full((len(self._order),), int(Termination.TERMINATED), dtype=torch.uint8),
            "prompt_lengths": share_array(prompt_lengths.astype(np.int32)),
        }
        digests = compute_prompt_digests(tokens, self._offsets, prompt_lengths)
        return CoreFields(
            tensors=tensors,
            prompt_digests=digests,
            spans=self._spans_with_splits(prompt_lengths),
            token_versions=None if by_token is None else self._by_response_token(by_token),
            routed_experts=self._read_routing(),
        )

    def _by_response_token(self, values: npt.NDArray[np.int32]) -> TensorColumn:
        counts = count_before(self._mask)
        return TensorColumn(values=share_array(values), offsets=share_array(counts[self._offsets]))

    def _spans_with_splits(self, prompt_lengths: _Integers) -> RowSpans:
        if self._layout.is_left_padded:
            return self._spans
        splits = np.empty_like(self._spans.splits)
        splits[self._order] = prompt_lengths
        return dataclasses.replace(self._spans, splits=splits)

    def _gather(self, name: str) -> npt.NDArray[Any]:
        """One value per token, in batch order, of a framed tensor ``[B, columns]``."""
        tensor, frame = self._fields.framed[name]
        if tensor.dim() != 2:
            raise_problems([f"{name!r} has shape {list(tensor.shape)}; expected [rows, columns]"], self._layout)
        return gather_by_token(_numbers(tensor), self._spans.columns(frame), self._order, self._spans.lengths)

    def _read_tokens(self) -> npt.NDArray[np.int32]:
        tensor, frame = self._fields.framed[self._layout.tokens]
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise_problems([f"{self._layout.tokens!r} is {tensor.dtype}; expected integers"], self._layout)
        tokens = gather(_numbers(tensor), self._spans.columns(frame), self._order).astype(np.int64)
        is_bad = (tokens < 0) | (tokens > _INT32_MAX)
        self._refuse(is_bad, tokens, f"{self._layout.tokens!r} is no token id (0 to 2**31 - 1)", "Correct the ids.")
        return tokens.astype(np.int32)

    def _read_rollout_logprobs(self) -> npt.NDArray[np.float32]:
        name = self._layout.rollout_logprobs
        if name is None or name not in self._fields.framed:
            return np.zeros(int(np.count_nonzero(self._mask)), dtype=np.float32)
        values = self._gather(name).astype(np.float32)
        remedy = (
            f"Set {self._layout.response_mask!r} to 0 on these tokens, or keep the tensor bit for bit without using "
            "it: dataclasses.replace(layout, rollout_logprobs=None)."
        )
        self._refuse(self._mask & ~np.isfinite(values), values, f"{name!r} is not finite on response tokens", remedy)
        return values[self._mask]

    def _read_routing(self) -> TensorColumn | None:
        """The experts of each row's tokens; where several are chosen, all zeros stand for a token without any."""
        name = self._layout.routed_experts
        if name is None or name not in {**self._fields.framed, **self._fields.dense}:
            return None
        tensor, frame = self._fields.framed.get(name, (self._fields.dense.get(name), None))
        if frame is None or tensor is None or tensor.dim() != 4 or tensor.dtype not in _EXPERT_DTYPES:
            found = "absent" if tensor is None else shape_text(tensor)
            raise_problems(
                [f"{name!r} is {found}; expected integers [rows, columns, layers, topk]"],
                self._layout,
                "Keep the tensor bit for bit without using it: dataclasses.replace(layout, routed_experts=None).",
            )
            return None
        columns, values = self._spans.columns(frame), tensor.numpy()
        pieces = []
        for row in self._order:
            first, stop, _ = columns[row]
            own = values[row, first:stop]
            if own.shape[2] > 1 and not own[-1].any():
                own = own[:-1] if own.any() else own[:0]
            pieces.append(own)
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
        joined = np.concatenate([values[:0].reshape(0, *values.shape[2:]), *pieces])
        return TensorColumn(values=torch.from_numpy(joined), offsets=share_array(offsets))

    def _refuse(self, is_bad: npt.NDArray[np.bool_], values: npt.NDArray[Any], what: str, remedy: str) -> None:
        """Raise ``BatchError`` where a token is flagged, with one line for each row."""
        if not is_bad.any():
            return
        positions = np.flatnonzero(is_bad)
        rows = np.searchsorted(self._offsets, positions, side="right") - 1
        problems = []
        for row in np.unique(rows):
            found = positions[rows == row]
            token = int(found[0] - self._offsets[row])
            problems.append(
                f"{what} in row {self._order[row]} ({self._identities[row]}): {len(found)} of {self._lengths[row]} "
                f"tokens, the first token {token}, {values[found[0]]}"
            )
        raise_problems(problems, self._layout, remedy)

    def _find_turn_starts(self) -> _Integers:
        """The first position of each turn among all tokens."""
        before = np.concatenate([[False], self._mask[:-1]])[: len(self._mask)]
        before[self._offsets[:-1]] = False
        return np.flatnonzero(self._mask & ~before)

    def _find_prompt_lengths(self, starts: _Integers, turn_offsets: _Integers) -> _Integers:
        """Tokens before the first response token, and no more than the prompt's columns where the layout has them."""
        first = self._lengths.copy()
        has_turn = turn_offsets[1:] > turn_offsets[:-1]
        first[has_turn] = (starts[turn_offsets[:-1][has_turn]]) - self._offsets[:-1][has_turn]
        if self._layout.is_left_padded:
            first = np.minimum(first, np.clip(self._spans.splits[self._order], 0, self._lengths))
        return first

    def _read_rewards(self, starts: _Integers, turn_offsets: _Integers) -> tuple[_Floats, _Floats]:
        """The total of each row and of each turn, in float64."""
        name = self._layout.rewards
        # In float64, so that a sum of float32 rewards is rounded once.
        totals, by_turn = np.zeros(len(self._order)), np.zeros(len(starts))
        if name is not None and name in self._fields.framed:
            values = self._gather(name).astype(np.float64)
            tokens = np.flatnonzero(values)
            rows = np.searchsorted(self._offsets, tokens, side="right") - 1
            # A reward before the row's first turn belongs to that one, never to the row before.
            turns = np.maximum(np.searchsorted(starts, tokens, side="right") - 1, turn_offsets[rows])
            np.add.at(totals, rows, values[tokens])
            has_turn = turn_offsets[rows + 1] > turn_offsets[rows]
            np.add.at(by_turn, turns[has_turn], values[tokens][has_turn])
        elif name is not None and name in self._fields.dense:
            per_row = _numbers(self._fields.dense[name]).astype(np.float64)
            totals = per_row.sum(axis=tuple(range(1, per_row.ndim)))[self._order]
            has_turn = turn_offsets[1:] > turn_offsets[:-1]
            by_turn[turn_offsets[1:][has_turn] - 1] = totals[has_turn]
        self._refuse_rewards(totals)
        return totals, self._replace_turn_rewards(by_turn, turn_offsets)

    def _refuse_rewards(self, totals: _Floats) -> None:
        problems = [
            f"{self._layout.rewards!r} is not finite in row {self._order[row]} ({self._identities[row]}): {totals[row]}"
            for row in np.flatnonzero(~np.isfinite(totals.astype(np.float32))).tolist()
        ]
        if problems:
            remedy = "Keep the tensor bit for bit without using it: dataclasses.replace(layout, rewards=None)."
            raise_problems(problems, self._layout, remedy)

    def _replace_turn_rewards(self, by_turn: _Floats, turn_offsets: _Integers) -> _Floats:
        """The rewards the framework lists per turn, in rows where it lists one finite number for each."""
        name = self._layout.turn_rewards
        if name is None or name not in self._fields.rows:
            return by_turn
        listed, out = self._fields.rows[name], by_turn.copy()
        for row, (start, stop) in enumerate(zip(turn_offsets[:-1].tolist(), turn_offsets[1:].tolist(), strict=True)):
            values = listed[self._order[row]]
            if not isinstance(values, list | tuple | np.ndarray) or len(values) != stop - start:
                continue
            if all(isinstance(value, int | float | np.number) for value in values):
                numbers = np.array(values, dtype=np.float64)
                out[start:stop] = numbers if np.isfinite(numbers.astype(np.float32)).all() else out[start:stop]
        return out

    def _read_versions(
        self, starts: _Integers, turn_rows: _Integers, policy_version: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """The version of each turn and, where the framework states it, of each response token."""
        name, tokens = self._layout.policy_versions, None
        if name is not None and name in self._fields.framed:
            tokens = self._gather(name)[self._mask]
            firsts = count_before(self._mask)[starts]
            # The oldest: a turn is as stale as its stalest token.
            versions = np.minimum.reduceat(tokens, firsts) if len(firsts) else tokens[:0]
        elif name is not None and name in self._fields.dense and self._fields.dense[name].dim() == 1:
            versions = _numbers(self._fields.dense[name])[self._order][turn_rows]
        else:
            return np.full(len(starts), policy_version, dtype=np.int32), None
        if len(versions) and max(-versions.min(), (versions if tokens is None else tokens).max()) > _INT32_MAX:
            raise_problems([f"{name!r} has policy versions outside of int32"], self._layout)
        return versions.astype(np.int32), None if tokens is None else tokens.astype(np.int32)


def _numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor as a NumPy array of the same values; floats that NumPy lacks become float32, a wider type."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        tensor = tensor.float()
    return tensor.numpy()
