"""Ranks find out who of them differs by a sequence of reductions, and nothing else.

Contract: every rank runs the generator ``agreement_rounds`` with its own values. It yields a ``Reduction``, is sent the
reduced words, and returns a line for every difference: the same lines on every rank, none where all agree. It has no
other means of communication, so processes, threads and simulations can drive it (``agreement.check_agreement`` does so
over torch.distributed).

The number of reductions and the number of words in each depend on the keys and on how many values differ, never on
the number of ranks:

1. one minimum over the digest of all values: eight words, and the end where all agree;
2. the keys, where ranks have different ones: as long as a rank has keys unknown to others, the lowest of these ranks
   says its own;
3. one minimum over a digest per key, to find the differing keys;
4. for the differing keys, value by value: the lowest rank with a value not named yet says it, and a sum, a minimum and
   a maximum tell how many ranks hold it, and the first and the last of them.

The words of a single rank travel as a sum in which all other ranks are zero.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from mock_scheduler.support.text import bullet_list

ABSENT = "absent"

MAX_VALUES = 4
"""Named values of one key; further ones are counted."""

MAX_KEY_ROUNDS = 8
"""Ranks that may add keys of their own; ranks with still others are counted."""

MAX_TEXT_BYTES = 480
"""Shown bytes of one value."""

_WORD_BYTES = 8
Words = list[int]


class Op(Enum):
    """How the words of all ranks become one."""

    MIN = "minimum"
    SUM = "sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """Words of this rank, as many on every rank, each an int64; the answer is their minimum or sum over all ranks."""

    op: Op
    words: Words


Rounds = Generator[Reduction, Words, list[str]]
_Step = Generator[Reduction, Words, Words]


def digest_words(digest: bytes) -> Words:
    """Cuts a digest into signed 64-bit words."""
    return [
        int.from_bytes(digest[start : start + _WORD_BYTES], "little", signed=True)
        for start in range(0, len(digest), _WORD_BYTES)
    ]


def agreement_rounds(values: Mapping[str, str], *, global_rank: int, world_size: int) -> Rounds:
    """Finds every key in which ranks differ: a line for each, as ``NCCL_ALGO: rank 3 'Tree'; ranks 0-2 'Ring'``."""
    text = json.dumps(dict(values), sort_keys=True)
    differs = yield from _differing(digest_words(hashlib.sha256(text.encode()).digest()))
    if not any(differs):
        return []
    keys, num_unheard = yield from _union_of_keys(values, global_rank=global_rank, world_size=world_size)
    digests = [_value_digest(values.get(key)) for key in keys]
    differing = yield from _differing(digests)
    keys = [key for key, is_different in zip(keys, differing, strict=True) if is_different]
    lines = yield from _name_values(
        [(key, values.get(key)) for key in keys], global_rank=global_rank, world_size=world_size
    )
    if num_unheard:
        lines.append(f"and {num_unheard} ranks have keys that are not listed here")
    return lines


def _differing(words: Words) -> _Step:
    """Returns 1 for each word with different values on the ranks, else 0."""
    # The complement turns the minimum into a maximum (min(~w) == ~max(w)) without overflow: one reduction gives both.
    lowest = yield Reduction(op=Op.MIN, words=[*words, *(~word for word in words)])
    minimum, complement = lowest[: len(words)], lowest[len(words) :]
    return [int(low != ~high) for low, high in zip(minimum, complement, strict=True)]


def _union_of_keys(
    values: Mapping[str, str], *, global_rank: int, world_size: int
) -> Generator[Reduction, Words, tuple[list[str], int]]:
    """Returns all ranks' keys, sorted, and the number of ranks with keys that could not be heard."""
    keys = sorted(values)
    differs = yield from _differing(digest_words(hashlib.sha256(json.dumps(keys).encode()).digest()))
    if not any(differs):
        return keys, 0
    known: set[str] = set()
    for _ in range(MAX_KEY_ROUNDS):
        unknown = sorted(values.keys() - known)
        (speaker,) = yield Reduction(op=Op.MIN, words=[global_rank if unknown else world_size])
        if speaker == world_size:
            return sorted(known), 0
        said = json.dumps(unknown).encode() if speaker == global_rank else None
        (heard,) = yield from _hear([said])
        known |= set(json.loads(heard or b"[]"))
    (num_unheard,) = yield Reduction(op=Op.SUM, words=[int(bool(values.keys() - known))])
    return sorted(known), num_unheard


def _hear(said: Sequence[bytes | None]) -> Generator[Reduction, Words, list[bytes]]:
    """Shares a list of texts; at most one rank knows each text, and the others give ``None`` for it."""
    sizes = yield Reduction(op=Op.SUM, words=[len(text or b"") for text in said])
    if not any(sizes):
        return [b"" for _ in said]
    num_words = [-(-size // _WORD_BYTES) for size in sizes]
    own = b"".join((text or b"").ljust(count * _WORD_BYTES, b"\0") for text, count in zip(said, num_words, strict=True))
    words = yield Reduction(op=Op.SUM, words=digest_words(own))
    whole = b"".join(word.to_bytes(_WORD_BYTES, "little", signed=True) for word in words)
    starts = accumulate((count * _WORD_BYTES for count in num_words), initial=0)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _value_digest(value: str | None) -> int:
    """Makes one word of a value or of its absence."""
    return digest_words(hashlib.sha256(_shown(value).encode()).digest())[0]


def _shown(value: str | None) -> str:
    return ABSENT if value is None else repr(value)


def _cut(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) <= MAX_TEXT_BYTES:
        return encoded
    return encoded[:MAX_TEXT_BYTES].decode(errors="ignore").encode() + f"… ({len(text)} characters)".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holders:
    """Holds one value of a key, and the ranks with this value."""

    text: str
    count: int
    first: int
    last: int

    def name(self, *, is_rest: bool) -> str:
        """``rank 3``, ``ranks 3,5``, ``ranks 8-15`` where this is exact, else the number with the first of them."""
        if self.count == 1:
            return f"rank {self.first}"
        if self.count == 2 and self.last > self.first + 1:
            return f"ranks {self.first},{self.last}"
        if self.last - self.first + 1 == self.count:
            return f"ranks {self.first}-{self.last}"
        if is_rest:
            return f"{self.count} other ranks (first rank {self.first})"
        return f"{self.count} ranks (first rank {self.first}, last rank {self.last})"


@dataclass(kw_only=True, slots=True)
class _Key:
    """A differing key, as one rank sees it while the values are being named."""

    name: str
    text: str
    digest: int
    is_named: bool = False  # whether this rank's own value was named
    holders: list[_Holders] = field(default_factory=list)
    num_unnamed: int = 0
    first_unnamed: int = 0

    def describe(self) -> str:
        rarest_first = sorted(self.holders, key=lambda holders: (holders.count, holders.first))
        named = [
            f"{holders.name(is_rest=holders is rarest_first[-1] and not self.num_unnamed)} {holders.text}"
            for holders in rarest_first
        ]
        if self.num_unnamed:
            ranks = "ranks" if self.num_unnamed > 1 else "rank"
            named.append(f"and {self.num_unnamed} {ranks} with other values (first rank {self.first_unnamed})")
        return f"{self.name}: {'; '.join(named)}"


def _name_values(values: Iterable[tuple[str, str | None]], *, global_rank: int, world_size: int) -> Rounds:
    keys = [_Key(name=name, text=_shown(value), digest=_value_digest(value)) for name, value in values]
    for _ in range(MAX_VALUES):
        speakers = yield from _lowest_unnamed(keys, global_rank=global_rank, world_size=world_size)
        open_keys = [key for key, speaker in zip(keys, speakers, strict=True) if speaker < world_size]
        if not open_keys:
            return [key.describe() for key in keys]
        speaking = [global_rank == speaker for speaker in speakers if speaker < world_size]
        yield from _name_next_value(open_keys, speaking, global_rank=global_rank, world_size=world_size)
    first_unnamed = yield from _lowest_unnamed(keys, global_rank=global_rank, world_size=world_size)
    num_unnamed = yield Reduction(op=Op.SUM, words=[int(not key.is_named) for key in keys])
    for key, first, count in zip(keys, first_unnamed, num_unnamed, strict=True):
        key.first_unnamed, key.num_unnamed = first, count
    return [key.describe() for key in keys]


def _lowest_unnamed(keys: Sequence[_Key], *, global_rank: int, world_size: int) -> _Step:
    """Finds for each key the lowest rank whose value was not named yet; ``world_size`` where all were."""
    return (yield Reduction(op=Op.MIN, words=[world_size if key.is_named else global_rank for key in keys]))


def _name_next_value(
    keys: Sequence[_Key], speaking: Sequence[bool], *, global_rank: int, world_size: int
) -> Generator[Reduction, Words, None]:
    """Names one more value of each key: its speaker says it, and all say whether they hold it."""
    pairs = list(zip(keys, speaking, strict=True))
    digests = yield Reduction(op=Op.SUM, words=[key.digest if speaks else 0 for key, speaks in pairs])
    texts = yield from _hear([_cut(key.text) if speaks else None for key, speaks in pairs])
    holds = [key.digest == digest for key, digest in zip(keys, digests, strict=True)]
    counts = yield Reduction(op=Op.SUM, words=[int(is_held) for is_held in holds])
    ends = yield Reduction(
        op=Op.MIN,
        words=[
            *(global_rank if is_held else world_size for is_held in holds),
            *(-global_rank if is_held else 1 for is_held in holds),
        ],
    )
    firsts, lasts = ends[: len(keys)], ends[len(keys) :]
    for key, is_held, text, count, first, last in zip(keys, holds, texts, counts, firsts, lasts, strict=True):
        key.is_named = key.is_named or is_held
        key.holders.append(_Holders(text=text.decode(), count=count, first=first, last=-last))


def describe_disagreement(lines: Sequence[str], *, world_size: int) -> str:
    """Writes the whole message about differing ranks."""
    return (
        f"the {world_size} ranks of this run differ:{bullet_list(lines, limit=None)}\n"
        "Start all ranks through launch/train.sh or launch/multi_node.sh with one configuration."
    )
