"""Compares the state of a model with the start of a baseline, and puts the baseline's in the place of what differs.

Contract: collective; all ranks raise the same error or none, and reading files never leaves a rank waiting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.determinism.agreement_rounds import Op, Reduction
from mock_scheduler.errors import AlignmentError, TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import MOMENTS, share_parameters
from mock_scheduler.megatron.start.source import StartSource
from mock_scheduler.megatron.start.state import (
    Holder,
    StartTensor,
    counts_by_group,
    find_unsettable,
    iterate_start,
    list_moments,
    refresh_parameters,
    set_num_updates,
)
from mock_scheduler.support.tensor_bytes import dtype_name, view_as_bits
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from mock_scheduler.trace.start_report import KindOfStart, StartDifference, StartKind

T = TypeVar("T")

#: Differences that a report names, problems that an error names, and problems that a rank tells of.
_NUM_FIRST, _NUM_NAMED, _NUM_SENT = 5, 10, 50
#: Elements that are widened at once.
_BLOCK = 1 << 20
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class StartSetting:
    """Compares and sets the state of one model. num_updates: counted by its optimizer; afterwards the baseline's."""

    def __init__(self, source: StartSource, model: ObservedModel, group: RankGroup, *, num_updates: int) -> None:
        self._source = source
        self._model = model
        self._group = group
        self._counted = num_updates
        self.num_updates = num_updates if source.num_updates is None else source.num_updates
        # Before its first update Adam has no state: there is nothing to compare.
        self._has_moments = bool(self._counted or self.num_updates)
        kinds: tuple[StartKind, ...] = ("initial", "optimizer") if self._has_moments else ("initial",)
        self._names: dict[StartKind, tuple[str, ...]] = {kind: self._list_names(kind) for kind in kinds}

    def _list_names(self, kind: StartKind) -> tuple[str, ...]:
        """Returns the same on every rank, which reads the same files."""
        names = self._source.names(kind)
        if kind == "optimizer" and not self.num_updates:
            names = tuple(f"{name}.{moment}" for name in self._source.names("initial") for moment in MOMENTS)
        return tuple(name for name in names if name.startswith(self._model.prefix))

    def check(self) -> None:
        """Raises ``AlignmentError`` where the state of any rank has no place in the other's; changes nothing."""
        if not self._names["initial"]:
            raise AlignmentError(
                f"{self._source.trace_dir} has no parameters before step {self._source.step}, so no run can start as "
                "its baseline did: trace the baseline with initial in trace.kinds, and all names"
            )
        problems = [*find_unsettable(self._model), *self._find_wrong_counts()]
        own: dict[StartKind, set[str]] = {kind: set() for kind in self._names}
        for tensor in iterate_start(self._model, has_moments=False):
            own["initial"].add(tensor.spec.name)
            problems += self._find_wrong_form(tensor)
        if self._has_moments:
            own["optimizer"] = set(list_moments(self._model))
        for kind, names in own.items():
            problems += [f"{name} is in this run only" for name in sorted(names - set(self._names[kind]))]
            held = self._count(kind, names)
            if kind == "initial" or self.num_updates:
                problems += [f"{name} is in the baseline only" for name, count in held.items() if not count]
        self._raise_together(
            problems, "this run cannot start as its baseline did", "Let both train one model with one optimizer."
        )

    def _find_wrong_counts(self) -> list[str]:
        if self._source.num_updates is None and self._counted:
            return [
                f"the optimizer has counted {self._counted} updates, and nothing says how many the baseline's had; "
                "trace the baseline with this release"
            ]
        if self._counted == self.num_updates or not counts_by_group(self._model):
            return []
        return [
            f"the optimizer has counted {self._counted} updates by parameter group, and the baseline's "
            f"{self.num_updates}; load one checkpoint in both"
        ]

    def _find_wrong_form(self, tensor: StartTensor) -> list[str]:
        name = tensor.spec.name
        if name not in self._names[tensor.kind]:
            return []
        dtype, shape = self._source.form(tensor.kind, name)
        if shape != tensor.spec.global_shape:
            is_padded = name.removeprefix(self._model.prefix) in (WORD_EMBEDDINGS, OUTPUT_LAYER)
            hint = "; where a layout pads the vocabulary, say vocab_size" if is_padded else ""
            return [f"{name} is of shape {list(tensor.spec.global_shape)}, the baseline's of {list(shape)}{hint}"]
        # Widening changes no value: a referee in float64 starts from the same weights.
        if torch.promote_types(dtype, tensor.dtype) is not tensor.dtype:
            return [f"{name} is of {dtype_name(tensor.dtype)}, the baseline's of {dtype_name(dtype)}"]
        return []

    def put(self) -> dict[StartKind, KindOfStart]:
        """Puts the baseline's state in the place of whatever differs, and reads it back.

        Raises:
            AlignmentError: it was set and is not there.
        """
        if self._counted != self.num_updates:
            set_num_updates(self._model, self.num_updates)
        kinds = self._walk(sets=True)
        if any(kind.num_set for kind in kinds.values()):
            refresh_parameters(self._model)
            share_parameters(self._model)
            left = self._walk(sets=False)
            names = [item.name for kind in left.values() for item in kind.first]
            self._raise_together(
                [f"{name} still differs" for name in names],
                "the baseline's state was set, and did not take",
                "The optimizer may update other tensors than the model's; attach after the optimizer is built.",
            )
        return kinds

    def _walk(self, *, sets: bool) -> dict[StartKind, KindOfStart]:
        found = call_together(lambda: self._find_differences(sets=sets), self._group)
        result: dict[StartKind, KindOfStart] = {}
        for kind in self._names:
            own = {name: relative for (of, name), relative in found.items() if of == kind}
            num_holders = self._count(kind, self._list_held(kind))
            num_set = sum(count > 0 for count in self._count(kind, own).values())
            result[kind] = KindOfStart(
                num_equal=sum(count > 0 for count in num_holders.values()) - num_set,
                num_set=num_set,
                first=self._gather_first(own),
            )
        return result

    def _list_held(self, kind: StartKind) -> set[str]:
        tensors = iterate_start(self._model, has_moments=kind == "optimizer")
        return {tensor.spec.name for tensor in tensors if tensor.kind == kind}

    def _find_differences(self, *, sets: bool) -> dict[tuple[StartKind, str], float | None]:
        """Every tensor of this rank that is another than the baseline's, with its relative distance."""
        found: dict[tuple[StartKind, str], float | None] = {}
        for tensor in iterate_start(self._model, has_moments=self._has_moments):
            distances = self._compare(tensor, sets=sets)
            if distances:
                # The parameter comes before its wide copy: it computes first.
                found[tensor.kind, tensor.spec.name] = distances[0]
        return found

    def _compare(self, tensor: StartTensor, *, sets: bool) -> list[float | None]:
        """Returns the distances of this rank's differing holders of one tensor; nothing of it outlives the call."""
        is_known = tensor.kind == "initial" or bool(self.num_updates)
        expected = self._source.read(tensor.kind, tensor.spec, tensor.padding) if is_known else None
        distances = []
        for holder in tensor.holders:
            part = _part_of(expected, holder)
            if torch.equal(view_as_bits(holder.tensor), view_as_bits(part)):
                continue
            distances.append(_relative_distance(holder.tensor, part))
            if sets:
                holder.tensor.copy_(part)
        return distances

    def _count(self, kind: StartKind, names: Collection[str]) -> dict[str, int]:
        """Counts, of every name of the baseline, the ranks that give it."""
        words = [int(name in names) for name in self._names[kind]]
        total = self._group.reduce(Reduction(op=Op.SUM, words=words)) if words else []
        return dict(zip(self._names[kind], total, strict=True))

    def _gather_first(self, own: Mapping[str, float | None]) -> tuple[StartDifference, ...]:
        """Returns the first differences of all ranks, in the order of the model; of several shards the largest."""
        first = sorted(own, key=_place_in_model)[:_NUM_FIRST]
        gathered: dict[str, list[float | None]] = {}
        for payload in self._group.gather(json.dumps({name: own[name] for name in first}).encode()):
            for name, relative in json.loads(payload).items():
                gathered.setdefault(name, []).append(relative)
        return tuple(
            StartDifference(
                name=name, relative=None if None in found else max(item for item in found if item is not None)
            )
            for name, found in sorted(gathered.items(), key=lambda item: _place_in_model(item[0]))[:_NUM_FIRST]
        )

    def _raise_together(self, problems: Sequence[str], what: str, advice: str) -> None:
        """Raises one error on every rank where any rank has a problem."""
        payload = json.dumps(sorted(set(problems), key=_place_in_model)[:_NUM_SENT]).encode()
        gathered = {text for one in self._group.gather(payload) for text in json.loads(one)}
        if gathered:
            lines = bullet_list(sorted(gathered, key=_place_in_model), limit=_NUM_NAMED)
            raise AlignmentError(f"{what} ({self._source.trace_dir}):{lines}\n{advice}")


def call_together(function: Callable[[], T], group: RankGroup) -> T:
    """Calls a function that does not communicate; a failure on any rank is raised by all."""
    result: list[T] = []
    problem = ""
    try:
        result.append(function())
    except OSError as error:
        problem = str(error)
    problems = [text.decode() for text in group.gather(problem.encode()) if text]
    if problems:
        raise TraceError(problems[0])
    return result[0]


def _part_of(expected: torch.Tensor | None, holder: Holder) -> torch.Tensor:
    """The elements of a holder, as it stores them; zeros where the baseline has none."""
    if expected is None:
        return torch.zeros_like(holder.tensor)
    if holder.flat_range is not None:
        expected = expected.reshape(-1)[slice(*holder.flat_range)]
    return expected.to(device=holder.tensor.device, dtype=holder.tensor.dtype)


def _relative_distance(own: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Relative Frobenius distance, block by block in float64; ``None`` beside zeros, or where it is not finite."""
    difference = size = 0.0
    for mine, theirs in zip(own.reshape(-1).split(_BLOCK), expected.reshape(-1).split(_BLOCK), strict=True):
        difference += float((mine.double() - theirs.double()).square().sum())
        size += float(theirs.double().square().sum())
    relative = math.sqrt(difference / size) if size else math.nan
    return relative if math.isfinite(relative) else None


def _place_in_model(name: str) -> tuple[int, int, str]:
    """Orders embedding, layers by number, and then the rest."""
    layer = _LAYER.search(name)
    if layer is not None:
        return 1, int(layer[1]), name
    return (0, 0, name) if name.startswith("embedding") else (2, 0, name)
