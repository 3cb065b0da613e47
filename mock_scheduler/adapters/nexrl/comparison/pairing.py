"""Compares the files that two dumps hold of a step's micro-batches, token by token and number by number.

Contract: files that say whose tokens they hold are paired by sample and position, so ranks, micro-batches, their
order and padding do not matter; others by rank and micro-batch. All files and tokens of both sides are accounted for:
values of one side alone are missing on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mock_scheduler.adapters.nexrl.comparison.tables import (
    DumpFile,
    SampleNumbers,
    TokenTable,
    as_pair,
    by_update,
)
from mock_scheduler.adapters.nexrl.comparison.values import (
    Difference,
    Status,
    Tolerance,
    compare_numbers,
    compare_tensors,
)
from mock_scheduler.adapters.nexrl.files import as_number
from mock_scheduler.adapters.nexrl.names import FileKey

Files = Mapping[FileKey, DumpFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One comparison: ``place`` as ``rank0_micro1``, or whose trajectory; ``where``: of the worst element; ``update``:
    the optimizer update of the step it belongs to.
    """

    place: str
    name: str
    difference: Difference
    where: str = ""
    update: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The values to compare of a kind of file: by token, where ``masks`` say; ``inputs`` at every token; numbers,
    with the values by token whose mean it is. ``optional``: names that count only where either side has them.
    """

    tensors: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    numbers: Mapping[str, str] | None = None
    optional: frozenset[str] = frozenset()

    def names(self) -> Iterator[str]:
        """All of them."""
        yield from (*self.masks, *self.inputs, *self.tensors, *(self.numbers or ()))


def missing(place: str, name: str, *, in_first: bool, detail: str) -> Item:
    """Makes the item for a value one side lacks."""
    status: Status = "missing_first" if in_first else "missing_second"
    return Item(place=place, name=name, difference=Difference(status=status, detail=detail))


def compare_files(
    first: Files, second: Files, wanted: Wanted, samples: SampleNumbers, tolerance: Tolerance
) -> list[Item]:
    """Every comparison of two dumps' files of one kind and step, in the order of the first one's files."""
    known = all(file.has_identities for file in (*first.values(), *second.values()))
    if not known:
        return _by_place(first, second, wanted, tolerance)
    items: list[Item] = []
    firsts, seconds = by_update(first), by_update(second)
    for update in sorted({*firsts, *seconds}):
        pair = _UpdatePair(firsts.get(update, []), seconds.get(update, []), wanted, samples, tolerance)
        items += [replace(item, update=update) for item in pair.items()]
    return items


class _UpdatePair:
    """The files of one update of both sides, each with identities of its tokens."""

    def __init__(
        self,
        first: Sequence[DumpFile],
        second: Sequence[DumpFile],
        wanted: Wanted,
        samples: SampleNumbers,
        tolerance: Tolerance,
    ) -> None:
        self._first, self._second, self._wanted = first, second, wanted
        self._samples, self._tolerance = samples, tolerance
        self._own, self._other = TokenTable(first), TokenTable(second)

    def items(self) -> list[Item]:
        """Compares each file of the first side, then lists tokens of the second side alone."""
        items = [item for file in self._first for item in self._of_file(file)]
        items += [
            item
            for table, name in ((self._own, "first"), (self._other, "second"))
            for item in self._doubled(table, name)
        ]
        for file in self._second:
            items += self._unpaired(file, self._own, in_first=True)
        return items

    def _doubled(self, table: TokenTable, side: str) -> list[Item]:
        keys = table.doubled
        if not len(keys):
            return []
        detail = (
            f"{len(keys)} tokens are in several files of the {side} dump, as {self._samples.describe(int(keys[0]))}"
        )
        return [Item(place=side, name="tokens", difference=Difference(status="unusable", detail=detail))]

    def _unpaired(self, file: DumpFile, table: TokenTable, *, in_first: bool) -> list[Item]:
        """Tokens of a file the other side's table does not hold."""
        if file.keys is None or file.mask is None:
            return []
        _, is_there = table.find(file.keys)
        lacking = file.keys[~is_there]
        if not len(lacking):
            return []
        detail = f"{len(lacking)} of {len(file.keys)} tokens, the first {self._samples.describe(int(lacking[0]))}"
        return [missing(file.key.place, "tokens", in_first=in_first, detail=detail)]

    def _of_file(self, file: DumpFile) -> Iterator[Item]:
        yield from self._unpaired(file, self._other, in_first=False)
        if file.keys is None or file.mask is None:
            return
        places, is_there = self._other.find(file.keys)
        if not is_there.any():
            return  # a micro-batch of padding, or all of it was said to be missing
        is_masked = is_there & file.mask & self._other.mask[places]
        for name in (*self._wanted.masks, *self._wanted.inputs):
            yield from self._tokens(file, name, places, is_there, is_there)
        for name in self._wanted.tensors:
            yield from self._tokens(file, name, places, is_there, is_masked)
        for name, by_token in (self._wanted.numbers or {}).items():
            yield from self._number(file, name, by_token)

    def _tokens(
        self, file: DumpFile, name: str, places: np.ndarray, is_there: np.ndarray, chosen: np.ndarray
    ) -> Iterator[Item]:
        """Compares a file's cells that are ``chosen``, among the cells of both sides (``is_there``)."""
        mine, theirs = file.values(name), self._other.values(name, places[is_there])
        absent = _absent(file, name, mine is None, theirs is None, self._wanted)
        if absent is not None or mine is None or theirs is None:
            yield from () if absent is None else (absent,)
            return
        picked = torch.from_numpy(np.flatnonzero(chosen))
        difference = compare_tensors(mine[picked], theirs[torch.from_numpy(chosen[is_there])], self._tolerance)
        where = ""
        if difference.worst is not None and difference.max_abs and file.keys is not None:
            where = self._samples.describe(int(file.keys[int(picked[difference.worst])]))
        yield Item(place=file.key.place, name=name, difference=difference, where=where)

    def _number(self, file: DumpFile, name: str, by_token: str) -> Iterator[Item]:
        """The number of the second side's file of the same tokens; else the mean of its values at these tokens."""
        keys = file.masked_keys()
        if not len(keys):
            return  # a mean of nothing
        same = [other for other in self._second if np.array_equal(other.masked_keys(), keys)]
        theirs = same[0].content.get(name) if len(same) == 1 else self._mean_of_other(by_token, keys)
        absent = _absent(file, name, name not in file.content, theirs is None, self._wanted)
        if absent is not None:
            yield absent
        elif name in file.content:
            yield _compare_scalars(file, name, theirs, self._tolerance)

    def _mean_of_other(self, by_token: str, keys: np.ndarray) -> float | None:
        places, is_there = self._other.find(keys)
        values = self._other.values(by_token, places) if is_there.all() else None
        if values is None:
            return None
        chosen = values.double().tolist()
        return math.fsum(chosen) / len(chosen)


def _absent(file: DumpFile, name: str, no_first: bool, no_second: bool, wanted: Wanted) -> Item | None:
    """Makes an item where either side lacks the value; None where both have it, or neither and it is optional."""
    if no_first and no_second and name in wanted.optional:
        return None
    if no_first or no_second:
        both = no_first and no_second
        detail = "in both dumps" if both else f"in the {'first' if no_first else 'second'} dump"
        return missing(file.key.place, name, in_first=no_first, detail=detail)
    return None


def _compare_scalars(file: DumpFile, name: str, theirs: object, tolerance: Tolerance) -> Item:
    one, other = as_number(file.content[name]), as_number(theirs)
    if one is None or other is None:
        side = "first" if one is None else "second"
        difference = Difference(status="unusable", detail=f"the {side} dump holds no single number")
    else:
        difference = compare_numbers(one, other, tolerance)
    return Item(place=file.key.place, name=name, difference=difference)


def _by_place(first: Files, second: Files, wanted: Wanted, tolerance: Tolerance) -> list[Item]:
    """Files of the same rank, micro-batch and update, element by element."""
    items: list[Item] = []
    for key in sorted({*first, *second}, key=lambda key: key.stem):
        if key not in first or key not in second:
            side = "first" if key not in first else "second"
            items.append(missing(key.place, "file", in_first=key not in first, detail=f"in the {side} dump"))
            continue
        found = _pair_of_files(first[key], second[key], wanted, tolerance)
        items += [replace(item, update=key.update) for item in found]
    return items


def _pair_of_files(first: DumpFile, second: DumpFile, wanted: Wanted, tolerance: Tolerance) -> Iterator[Item]:
    for name in wanted.names():
        absent = _absent(first, name, name not in first.content, name not in second.content, wanted)
        if absent is not None:
            yield absent
        elif name not in first.content:
            continue
        elif wanted.numbers and name in wanted.numbers:
            yield _compare_scalars(first, name, second.content[name], tolerance)
        else:
            compare: Callable[..., Item] = (
                _compare_whole if name in (*wanted.masks, *wanted.inputs) else _compare_masked
            )
            yield compare(first, second, name, tolerance)


def _compare_whole(first: DumpFile, second: DumpFile, name: str, tolerance: Tolerance) -> Item:
    one, other = as_pair(first.content[name], second.content[name])
    if one is None or other is None:
        difference = Difference(status="unusable", detail="no tensor")
    else:
        difference = compare_tensors(one, other, tolerance)
    return Item(place=first.key.place, name=name, difference=difference, where=_cell(one, difference))


def _compare_masked(first: DumpFile, second: DumpFile, name: str, tolerance: Tolerance) -> Item:
    """Compares where both masks are True; everywhere where a file has no mask."""
    one, other = as_pair(first.content[name], second.content[name])
    if one is None or other is None or one.shape != other.shape:
        return _compare_whole(first, second, name, tolerance)
    kept = torch.ones(one.numel(), dtype=torch.bool)
    for file in (first, second):
        mask = file.flat_mask(one.numel())
        kept = kept if mask is None else kept & mask
    difference = compare_tensors(one.reshape(-1)[kept], other.reshape(-1)[kept], tolerance)
    if difference.worst is None:
        return Item(place=first.key.place, name=name, difference=difference)
    flat = int(torch.nonzero(kept).flatten()[difference.worst])
    return Item(place=first.key.place, name=name, difference=difference, where=_place_of(one, flat, difference))


def _cell(tensor: torch.Tensor | None, difference: Difference) -> str:
    if tensor is None or difference.worst is None:
        return ""
    return _place_of(tensor, difference.worst, difference)


def _place_of(tensor: torch.Tensor, flat: int, difference: Difference) -> str:
    """``[0, 17]``; empty where nothing differs."""
    return str([int(index) for index in np.unravel_index(flat, tensor.shape)]) if difference.max_abs else ""
