"""What a difference looks like and where it lies, as plain data; ``verdict.wording.residuals`` puts it into words.

A *residual* is an explanation of ``b - a``, with the baseline a and the candidate b. A *locality* is a part of a tensor
holding most of ``||a - b||²``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.trace.entries import DimName

Side = Literal["baseline", "candidate"]

ResidualKind = Literal[
    "ratio",
    "missing part",
    "doubled part",
    "sign",
    "permutation",
    "shift",
    "stale",
    "zeroed",
    "constant",
    "one element",
    "narrowed",
    "left over",
    "decay",
    "choice",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowed:
    """Every element of the candidate has at most ``Residual.value`` bits of mantissa; ``num_bits``: the baseline's."""

    num_bits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Evenly spaced elements, looked at in the place of a whole tensor."""

    num_seen: int
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OneElement:
    """One element holds the difference; ``Residual.value`` is its b - a."""

    num_elements: int
    num_different: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """All of one side is zero."""

    side: Side


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiple:
    """The candidate is ``Residual.value`` times the baseline.

    Args:
        error: The standard error of the ratio.
        factor: The number of the layout equal to the ratio, as ``1/tp``; ``None`` where it is none.
        rest: The rest of the difference when the multiple is taken away.
        num_gradients: The ratio is the median of so many gradients of the update; 0 where it is the tensor's own.
    """

    error: float
    factor: str | None = None
    rest: Literal["nothing", "rounding", "noise"] = "nothing"
    num_gradients: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBlock:
    """Some elements are ``Residual.value`` times the baseline; ``zero_side``: the side that is 0 there, if any is."""

    num_inside: int
    num_elements: int
    zero_side: Side | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSums:
    """Some of the partial sums are missing from the candidate, or are in it once more.

    Args:
        parts: Their names, or their numbers where they have no names.
        num_parts: How many partial sums there are; ``None`` where they have names.
    """

    parts: tuple[str, ...]
    num_parts: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreducedCopies:
    """Each rank of ``axes`` holds its own part of the baseline.

    Args:
        axes: The axes over which nothing was reduced.
        reduction: The baseline is the parts' sum or mean; ``multiple``: their sum is ``Residual.value`` baselines.
        factor: For ``multiple``, the number of the layout it is.
    """

    axes: tuple[str, ...]
    reduction: Literal["sum", "mean", "multiple"]
    factor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongCopies:
    """Copies at some places, as ``tp0``, are the baseline's; copies at other places are not."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """The candidate at index i is the baseline at i - ``Residual.value``, along a dimension (its name or number)."""

    dim: DimName | int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOrder:
    """An order of indices, by the blocks moved as a whole.

    Args:
        form: ``exchanged``: two runs of indices stand in each other's place. ``interleaved``: one block of each part in
            turn.
        num_indices: Length of the dimension.
        num_moved: Indices out of their place.
        block_size: Of ``interleaved`` and ``other``.
        runs: Of ``exchanged``, first and last index of both runs.
        first: Of ``rotated``, the baseline's index at the beginning.
        num_parts: Of ``interleaved``.
    """

    form: Literal["reversed", "exchanged", "rotated", "interleaved", "other"]
    num_indices: int
    num_moved: int
    block_size: int = 1
    runs: tuple[tuple[int, int], ...] = ()
    first: int = 0
    num_parts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MisplacedShards:
    """Ranks hold each other's shards: each row is a rank, as ``tp0``, and the rank whose shard it holds."""

    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongCut:
    """A tensor was cut over ``axis`` as another one is cut.

    Args:
        axis: As ``tp``; ``ranks`` where no single axis tells the holders apart.
        is_whole: The parts were cut in one piece, where each part is to be cut; else one piece was cut as parts.
        num_parts: How many parts the tensor has, or was cut as.
        part_names: Names of the parts, as ``gate`` and ``up``; empty where not known.
    """

    axis: str
    is_whole: bool
    num_parts: int
    part_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reorder:
    """The baseline's values in another order along a dimension; ``holders``: the mistake of ranks' shards behind it.

    ``dim``: ``batch row`` where rows of the batch have one value each.
    """

    dim: DimName | Literal["batch row"] | int
    order: BlockOrder
    holders: MisplacedShards | WrongCut | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherChoice:
    """``Residual.value`` tokens have other experts; the first of them, in the order of the batch, is described.

    Args:
        num_tokens: All tokens.
        num_fewer: Tokens with fewer experts than in the baseline.
        sample: Identity of the first one's row; empty where rows are not known. position: Its place there.
        lost: Its experts in the baseline alone; ``gained``: in the candidate alone.
    """

    num_tokens: int
    num_fewer: int
    sample: str
    position: int
    lost: tuple[int, ...]
    gained: tuple[int, ...]


ResidualDetail = (
    OneElement
    | Zero
    | Multiple
    | ElementBlock
    | PartialSums
    | UnreducedCopies
    | WrongCopies
    | Shift
    | Reorder
    | Narrowed
    | OtherChoice
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """An explanation of a difference.

    Args:
        kind: The explanation.
        value: The ratio, offset, distance or count found.
        explained: The explained part of ``||a - b||²``, 0 to 1.
        detail: All the kind and the value do not say; ``None`` where they say all.
        sample: The elements looked at; ``None`` for all.
        is_of_change: It explains the change by an update, and not the parameter after it.
    """

    kind: ResidualKind
    value: float
    explained: float
    detail: ResidualDetail | None = None
    sample: Sample | None = None
    is_of_change: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a difference is spread over a tensor; a row is an index of the first dimension, without rows of zeros.

    Args:
        direction_z: How far the rows' parts of <a, b - a> have one sign, in standard deviations of chance; rows of
            equal values count as one. The columns' where these have less of one sign.
        num_rows: Rows.
        num_equal_rows: Rows with equal bits.
        row_size: Elements of a row.
        density: Of rows with other bits, the median part of their elements that are other.
        num_parts: Ranks' pieces of the other dimensions; 1 where there are none.
        num_equal_parts: Those with equal bits in all rows.
        num_bits: Bits of mantissa down to the lowest that any element of the baseline has.
    """

    direction_z: float
    num_rows: int
    num_equal_rows: int
    row_size: int
    density: float
    num_parts: int
    num_equal_parts: int
    num_bits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Locality:
    """A part of a tensor in which the difference is concentrated, as head 3 or tokens 40 to 55.

    Args:
        dim: The dimension counts these.
        first: First index of the part.
        last: Last index of the part, included.
        share: The part's share of ``||a - b||²``, 0 to 1.
        num_indices: Indices of the part; fewer than lie between first and last where they are scattered.
        dim_size: All indices of the dimension.
        num_pieces: The part consists of exactly so many ranks' pieces; 0 where it does not.
        edge: The part begins or ends where a rank's piece does.
        sample: The elements looked at; ``None`` for all.
        relative: ``||a - b|| / ||a||`` of the part, where it was held against perturbed runs.
        noise: The largest such figure of the perturbed runs.
    """

    dim: DimName
    first: int
    last: int
    share: float
    num_indices: int
    dim_size: int
    num_pieces: int = 0
    edge: Literal["begins", "ends"] | None = None
    sample: Sample | None = None
    relative: float | None = None
    noise: float | None = None

    @property
    def fraction(self) -> float:
        """Returns the part of the dimension's indices, 0 to 1."""
        return self.num_indices / self.dim_size

    @property
    def is_scattered(self) -> bool:
        """Whether indices between the first and the last do not belong to the part."""
        return self.num_indices <= self.last - self.first
