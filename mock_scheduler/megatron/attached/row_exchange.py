"""Tells the ranks of a replica which rows a micro-batch has, through the store of the process group.

The first pipeline stage is called with the tokens, later stages are not. Each message is put before the first stage
computes, and taken by ranks that can compute only after it, or together with it: nobody waits for a rank that is
behind. Nothing here is a collective, so no schedule can be disturbed.

Contract: a message is put once and removed by its writer at the end of the update, when the replica's backward passes
have shown that every rank has read it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.megatron.attached.row_finding import FoundRows, Ints, Slice
from mock_scheduler.megatron.ranks import ModelRanks

_REPEATED = "~"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchRows:
    """The rows of one micro-batch, as every rank of a replica's place in context parallelism has them.

    names: of the rows, unique in the update. lengths: their tokens. numbers, positions: as in ``FoundRows``.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    numbers: Ints
    positions: Ints


class RowExchange:
    """One rank's end of the exchange. store: shared by all ranks, with a prefix that no other run has."""

    def __init__(self, store: Store, ranks: ModelRanks) -> None:
        self._store = store
        self._ranks = ranks
        self._own_keys: list[str] = []
        self._counts: Counter[str] = Counter()

    def gather_slices(self, key: str, own: Slice) -> list[Slice]:
        """Gives the slices of all ranks of context parallelism; each of them, on the first stage at tp 0, calls it."""
        ranks = self._ranks
        if ranks.cp_size == 1:
            return [own]
        place = f"{key}/slice/{ranks.dp_rank}"
        self._put(
            f"{place}/{ranks.cp_rank}", _pack({"fits": own.fits.tolist()}, own.tokens, *own.lines, *own.positions)
        )
        others = (self._store.get(f"{place}/{cp_rank}") for cp_rank in range(ranks.cp_size))
        return [_read_slice(message) for message in others]

    def name_rows(self, key: str, update: str, names: Sequence[str]) -> tuple[str, ...]:
        """Tells repeated names of an update apart: the second is ``{name}~2``. All ranks of ``gather_slices`` call it.

        Which of several equal rows is the second depends on which replica comes first; they are equal in content.
        """
        ranks = self._ranks
        place = f"{key}/names/{ranks.dp_rank}"
        if ranks.cp_rank != 0:
            return tuple(json.loads(self._store.get(place)))
        told_apart = []
        for name in names:
            count = self._count(f"{update}/row/{name}")
            told_apart.append(name if count == 1 else f"{name}{_REPEATED}{count}")
        if ranks.cp_size > 1:
            self._put(place, json.dumps(told_apart).encode())
        return tuple(told_apart)

    def tell(self, key: str, rows: MicroBatchRows) -> None:
        """Puts the rows there for the other ranks of this place in context parallelism."""
        ranks = self._ranks
        if ranks.tp_size * ranks.pp_size == 1:
            return
        header = {"names": rows.names, "lengths": rows.lengths}
        self._put(self._place(key), _pack(header, rows.numbers, rows.positions))

    def ask(self, key: str) -> MicroBatchRows:
        """Takes the rows that the first stage's rank at tp 0 has put there, or is about to."""
        header, (numbers, positions) = _unpack(self._store.get(self._place(key)))
        return MicroBatchRows(
            names=tuple(header["names"]), lengths=tuple(header["lengths"]), numbers=numbers, positions=positions
        )

    def end_update(self) -> None:
        """Removes this rank's messages."""
        for key in self._own_keys:
            self._store.delete_key(key)
        self._own_keys.clear()
        self._counts.clear()

    def _place(self, key: str) -> str:
        return f"{key}/rows/{self._ranks.dp_rank}/{self._ranks.cp_rank}"

    def _count(self, key: str) -> int:
        """Counts a name over all replicas."""
        if self._ranks.dp_size == 1:
            self._counts[key] += 1
            return self._counts[key]
        self._own_keys.append(key)
        return int(self._store.add(key, 1))

    def _put(self, key: str, message: bytes) -> None:
        # torch's annotations say str; the store takes any bytes.
        self._store.set(key, message)  # type: ignore[arg-type]
        self._own_keys.append(key)


def name_found(found: FoundRows, names: tuple[str, ...]) -> MicroBatchRows:
    """Gives found rows their names."""
    return MicroBatchRows(
        names=names,
        lengths=tuple(row.size for row in found.rows),
        numbers=found.numbers,
        positions=found.positions,
    )


def _read_slice(message: bytes) -> Slice:
    header, (tokens, *by_way) = _unpack(message)
    num_ways = len(by_way) // 2
    return Slice(
        tokens=tokens,
        lines=np.stack(by_way[:num_ways]),
        positions=np.stack(by_way[num_ways:]),
        fits=np.array(header["fits"], dtype=np.int64),
    )


def _pack(header: Mapping[str, object], *arrays: Ints) -> bytes:
    """Returns one line of JSON with the shape of the arrays, then their numbers."""
    line = json.dumps({**header, "shape": list(arrays[0].shape)}).encode()
    return b"\n".join([line, b"".join(array.astype("<i8").tobytes() for array in arrays)])


def _unpack(message: bytes) -> tuple[dict[str, Any], list[Ints]]:
    line, _, numbers = message.partition(b"\n")
    header = json.loads(line)
    shape = tuple(header["shape"])
    flat = np.frombuffer(numbers, dtype="<i8").astype(np.int64)
    return header, [part.reshape(shape) for part in flat.reshape(-1, int(np.prod(shape)))]


def shared_store(run: AttachedRun, prefix: str) -> Store:
    """The process group's own store; the prefix has no other run, nor another model of this one."""
    store = distributed_c10d._get_default_store()
    return PrefixStore(f"mock_scheduler/{json.dumps([run.output_dir, prefix])}", store)
