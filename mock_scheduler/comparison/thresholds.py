"""Every number by which a comparison decides, in one table: value, unit, reason and source.

Three words are used throughout. The *relative difference* of a tensor is ``||a - b|| / ||a||`` with the baseline a and
the candidate b (``0/0 = 0``, ``x/0 = inf``); of a parameter, a and b are the changes that one update made. The
*tolerance* is the bound that the relative difference is held to. The *margin* is tolerance / relative: how many times
the difference would fit into the tolerance.

Sources: a paper; ``convention``, where another value of the same size would do as well; or ``measured``, with the
command that measures it again. ``python -m tests.faults --help`` plants each fault of the catalogue at several sizes,
and honest changes of layout beside them; a threshold lies where neither comes near.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Holds one number of the table."""

    value: float
    unit: str
    reason: str
    source: str


#: All numbers by name, in the order of this page.
TABLE: dict[str, Threshold] = {}

_HONEST = "measured: honest layouts in float32 and bfloat16, python -m tests.faults"
_SPEED = "measured: python -m benchmarks.compare"
_CONVENTION = "convention"


def _define(name: str, value: _Number, *, unit: str, reason: str, source: str = _CONVENTION) -> _Number:
    TABLE[name] = Threshold(value=value, unit=unit, reason=reason, source=source)
    return value


# --- Bounds -----------------------------------------------------------------------------------------------------------

SAFETY = _define(
    "SAFETY",
    3.0,
    unit="times the largest noise of the perturbed runs",
    reason="an honest change of layout is at most 1.13 p in float32 and about P / 2 in bfloat16 (p: median of the "
    "perturbed runs, P: largest), so that 3 leaves room on both sides",
    source=_HONEST,
)
FEWEST_ROUNDINGS = _define(
    "FEWEST_ROUNDINGS",
    4.0,
    unit="unit roundoffs of what accumulates",
    reason="one number that all gradients are multiplied by may itself be rounded: less cannot be told from nothing",
)
TAIL_ROOM = _define(
    "TAIL_ROOM",
    2.0,
    unit="times the largest noise over the second largest",
    reason="how far a run may be beyond all others, told by how far each perturbed run is beyond its others",
    source="measured: each of 25 perturbed runs held to four others; 12 in bfloat16 leave 3 P, 4 leave this",
)
LARGEST_TAIL = _define(
    "LARGEST_TAIL",
    9.0,
    unit="times the largest noise",
    reason="caps TAIL_ROOM at SAFETY of SAFETY, so that one odd run does not widen its pool without end",
)
LARGEST_BOUND = _define(
    "LARGEST_BOUND",
    0.5,
    unit="relative difference",
    reason="a tensor that may differ by half of itself says nothing of an error, so it is not judged",
)
NUM_ULPS = _define(
    "NUM_ULPS",
    4,
    unit="units in the last place",
    reason="where no element is further apart, reports call it ulp; no verdict depends on it",
)
THEORY_GROWTH = _define(
    "THEORY_GROWTH",
    1.03,
    unit="times per layer",
    reason="C: how a relative error grows from layer to layer",
    source="arXiv 2506.09280, Theorem 5.3 and its measurement",
)
THEORY_LAYERS = _define(
    "THEORY_LAYERS",
    500,
    unit="layers",
    reason="behind more the bound allows anything, and a float still holds it; a name may claim any number",
)
THEORY_FACTOR = _define(
    "THEORY_FACTOR",
    4.0,
    unit="spacings of the model's numbers at 1",
    reason="k: the error of the first layer; honest layouts were at up to 2.3 times k · C^d · ε, hence SAFETY times it",
    source="arXiv 2506.09280, Theorem 5.3",
)
THEORY_MOMENTS = _define(
    "THEORY_MOMENTS",
    2.0,
    unit="times the bound of a gradient",
    reason="the moments of an optimizer are products of two gradients, whose relative errors add",
    source="first order of (1 + e)²",
)

# --- Measuring two tensors --------------------------------------------------------------------------------------------

SIGNIFICANT = _define(
    "SIGNIFICANT",
    4.0,
    unit="times the relative difference of the whole gradient",
    reason="an element whose gradient differs by more is rounding, of which Adam makes a whole step either way; the "
    "share that is left out (16 % of small models) is then the same in every precision",
    source=_HONEST,
)
LARGEST_SIGNIFICANT = _define(
    "LARGEST_SIGNIFICANT",
    1.0,
    unit="fraction of the element's gradient",
    reason="under a measured bound: where all of a gradient is noise, the bound of its update knows it",
)
LARGEST_SIGNIFICANT_UNMEASURED = _define(
    "LARGEST_SIGNIFICANT_UNMEASURED",
    1e-2,
    unit="fraction of the element's gradient",
    reason="under a bound that was not measured, which does not know where a gradient is noise",
)
POOL_ROUNDING_UNITS = _define(
    "POOL_ROUNDING_UNITS",
    16,
    unit="units in the last place of the root mean square of all tensors of a kind and update",
    reason="a gradient whose true value is 0 was measured at 0.3 to 0.9 of them; 16, where an explanation takes 8 of "
    "the tensor itself, since it stands in for a bound and must hold for every layer of the pool",
    source=_HONEST,
)
FLIP_MOVES = _define(
    "FLIP_MOVES",
    2,
    unit="times the largest move of the token's logits",
    reason="the gap of two logits closes by the moves of both",
    source="arithmetic: (x + d) - (y - d) = x - y + 2d",
)
SMALLEST_DIFFERENCE = _define(
    "SMALLEST_DIFFERENCE",
    2.0**-52,
    unit="relative difference",
    reason="integers whose fingerprints differ are different, though the estimate of a sketch may be 0",
    source="the spacing of float64 at 1",
)
CHUNK_ELEMENTS = _define(
    "CHUNK_ELEMENTS",
    1 << 17,
    unit="elements",
    reason="fastest of 32 Ki to 256 Ki on two cores: with smaller ones, threads pass on Python's lock",
    source=_SPEED,
)
BLOCK_ELEMENTS = _define(
    "BLOCK_ELEMENTS",
    1 << 20,
    unit="elements",
    reason="what one thread takes at a time; the order of sums depends on it, so that it is fixed on every machine",
)
NUM_LANES = _define(
    "NUM_LANES",
    16,
    unit="sums that stand for one",
    reason="two vectors of the widest processors; every sum's bits depend on it",
)
MOST_THREADS = _define(
    "MOST_THREADS", 8, unit="threads", reason="a comparison leaves some of a large machine to what else runs there"
)
NUM_BUFFERS = _define(
    "NUM_BUFFERS",
    4,
    unit="chunks in float64 of one thread",
    reason="the parameter before and after an update, of both sides",
    source="arithmetic",
)
TILE_ELEMENTS = _define(
    "TILE_ELEMENTS",
    1 << 16,
    unit="elements",
    reason="summed along every dimension at once; smaller than CHUNK_ELEMENTS, as such a part is held in float64 "
    "several times over",
)

# --- Explanations -----------------------------------------------------------------------------------------------------

ENOUGH = _define(
    "ENOUGH",
    0.9,
    unit="share of ||a - b||²",
    reason="an explanation that leaves more than a third of the norm (√0.1) explains nothing",
)
LEFT_OVER = _define(
    "LEFT_OVER",
    0.75,
    unit="share of ||a - b||²",
    reason="a multiple of another update's gradient is like no rounding; of a buffer whose shards were reduced twice, "
    "the part that a rank itself adds is left out: 0.83 of two ranks",
    source="measured: a gradient buffer that is not cleared, in dp2",
)
MOST_OF_IT = _define(
    "MOST_OF_IT",
    0.5,
    unit="share of ||a - b||²",
    reason="of a ratio whose rest is within the bound of noise: both explain all, and the ratio the larger part",
)
FEWEST_ELEMENTS = _define(
    "FEWEST_ELEMENTS",
    16,
    unit="elements",
    reason="a random difference of 16 elements lies along one given direction to ENOUGH once in 1.5e8",
    source="beta distribution of cos² between random vectors",
)
FEWEST_COPY_ELEMENTS = _define(
    "FEWEST_COPY_ELEMENTS",
    8,
    unit="elements",
    reason="fewer than FEWEST_ELEMENTS: that copies add up to the baseline fits no number, and each must be near it",
)
FEWEST_ROW_VALUES = _define(
    "FEWEST_ROW_VALUES",
    3,
    unit="different values of rows",
    reason="of two values, as rewards of 0 and 1, half of all wrong assignments are orders of the right one",
)
FEWEST_PLACE_ELEMENTS = _define(
    "FEWEST_PLACE_ELEMENTS",
    32,
    unit="elements",
    reason="more than FEWEST_ELEMENTS: a place is the most extreme of many, and its median needs some of its own",
)
PARALLEL = _define(
    "PARALLEL",
    0.99,
    unit="cosine",
    reason="two tensors of one direction differ by a ratio; 0.99 leaves a rest of 14 % of the tensor, which no number "
    "makes",
)
LARGEST_DECAY = _define(
    "LARGEST_DECAY",
    0.05,
    unit="of a parameter, by one update",
    reason="learning rate times weight decay; larger is no decay, and norms of equal weights would take any constant",
)
LEAST_NARROWING = _define(
    "LEAST_NARROWING",
    4,
    unit="bits of mantissa, fewer than the baseline's",
    reason="FEWEST_ELEMENTS different numbers all end in four zeros once in 2^64; bfloat16 from float32 is 16, float8 "
    "from bfloat16 is 4",
    source="arithmetic",
)
NARROWED_SAMPLE = _define(
    "NARROWED_SAMPLE", 4096, unit="elements", reason="among these FEWEST_ELEMENTS must be different, if any are"
)
SHORT_BITS = _define(
    "SHORT_BITS",
    12,
    unit="bits of mantissa",
    reason="a sum of two numbers of bfloat16 has at most so many where the larger is at most 16 times the smaller; a "
    "number that was not rounded has them once in 2^11",
)
DIVISION_ROUNDINGS = _define(
    "DIVISION_ROUNDINGS", 1.5, unit="unit roundoffs of float32", reason="of a division and its product, and a margin"
)
LARGEST_DIVISOR = _define(
    "LARGEST_DIVISOR",
    4096,
    unit="tokens, or whatever gradients are divided by",
    reason="half of FEWEST_NARROWED numbers are short at one of so many divisors by chance less than once in 1e100",
)
FEWEST_NARROWED = _define(
    "FEWEST_NARROWED", 128, unit="elements of all gradients of an update", reason="of which half are short"
)
NARROWED_GRADIENT = _define(
    "NARROWED_GRADIENT", 32, unit="elements of one gradient", reason="so that large ones do not outweigh all others"
)
NARROWED_UPDATE = _define(
    "NARROWED_UPDATE",
    512,
    unit="elements of all gradients of an update",
    reason="0.1 s for all divisors",
    source=_SPEED,
)
FEWER_BITS = _define(
    "FEWER_BITS",
    1.25,
    unit="bits, the mean of the elements",
    reason="sums of four numbers of bfloat16 have 9 in the mean, of two rounded ones 7; as many sums in another order "
    "have the same within 0.2, those of experts whose ranks see all tokens at once 1.0 fewer",
    source="measured: a gradient buffer that is rounded before its reduction",
)
FEWEST_EQUIVALENT = _define(
    "FEWEST_EQUIVALENT",
    8.0,
    unit="elements of equal weight, (Σ|p|)² / Σp²",
    reason="a ratio rests on these; fewer than FEWEST_ELEMENTS, since weights are never equal: 16 normal numbers are "
    "worth about 10",
)
FEWEST_SLOPES = _define(
    "FEWEST_SLOPES",
    8,
    unit="tensors",
    reason="of fewer slopes, a median and its deviation say nothing",
)
SAMPLE_ELEMENTS = _define(
    "SAMPLE_ELEMENTS",
    1 << 20,
    unit="elements",
    reason="an explanation passes over its tensors many times, and shall take seconds whatever their size",
)
PLACE_SAMPLE_ELEMENTS = _define(
    "PLACE_SAMPLE_ELEMENTS",
    1 << 22,
    unit="elements",
    reason="more than SAMPLE_ELEMENTS: places take one pass, and every index of a dimension must be seen",
)
EXPLAINED_ROUNDING_UNITS = _define(
    "EXPLAINED_ROUNDING_UNITS",
    8,
    unit="spacings of the tensor's dtype at 1",
    reason="what is no larger, relative to the tensor, is rounding and needs no explanation",
)
CLOSE = _define(
    "CLOSE",
    5e-3,
    unit="relative to the number",
    reason="how near a ratio must be to a number of the layout to be it",
)
VERY_CLOSE = _define(
    "VERY_CLOSE",
    1e-3,
    unit="relative to the number",
    reason="the same of few elements, which prove less",
)
COPY_CLOSE = _define(
    "COPY_CLOSE",
    1e-2,
    unit="relative to the baseline",
    reason="a sum of copies in another order and precision may be this far from the baseline; more than CLOSE, since "
    "nothing was fitted",
)
COPY_ROUNDING = _define(
    "COPY_ROUNDING",
    1e-3,
    unit="relative to the copies",
    reason="copies that are nearer to each other are the same but for rounding, and no partial sums",
)
TIE = _define(
    "TIE", 1e-9, unit="relative to the number", reason="numbers of the layout that fit equally well are all named"
)
NO_RATIO = _define(
    "NO_RATIO",
    1e-6,
    unit="ratio",
    reason="a ratio that is smaller is 0: the candidate has none of the baseline",
)
RATIO_DEVIATIONS = _define(
    "RATIO_DEVIATIONS",
    6.0,
    unit="standard errors",
    reason="a ratio that is so far from 1 is none by chance more than once in 5e8",
    source="normal distribution; standard error of White, Econometrica 48 (1980)",
)
RATIO_ROUNDINGS = _define(
    "RATIO_ROUNDINGS",
    8,
    unit="spacings of float32 at 1",
    reason="what accumulates in float32 may be off by a few of its roundings, all to one side",
)
DEVIATION_OF_MAD = _define(
    "DEVIATION_OF_MAD",
    1.4826,
    unit="standard deviations per median absolute deviation",
    reason="of a normal distribution",
    source="1 / Φ⁻¹(3/4)",
)
ERROR_OF_MEDIAN = _define(
    "ERROR_OF_MEDIAN",
    1.2533,
    unit="standard errors of a median per one of a mean",
    reason="of a normal distribution",
    source="√(π/2)",
)
OUTLIER_SHARE = _define(
    "OUTLIER_SHARE",
    1e-2,
    unit="of the element",
    reason="one element among many that differ explains them only where it is off by more than rounding makes it",
)
MOST_PARTS = _define(
    "MOST_PARTS",
    8,
    unit="partial sums",
    reason="all subsets of so many are tried (256); of more, single ones and pairs",
)
MOST_PLACES = _define(
    "MOST_PLACES", 16, unit="places of an axis", reason="each is read from the trace; more would take minutes"
)
NUM_FIRST = _define(
    "NUM_FIRST", 6, unit="tensors", reason="explained, the first beyond their bounds in the order of computation"
)
NUM_LARGEST = _define("NUM_LARGEST", 2, unit="tensors", reason="explained, the furthest beyond their bounds")
OTHER_TENSOR = _define(
    "OTHER_TENSOR",
    0.1,
    unit="relative difference",
    reason="a loaded parameter that is nearer is the same one, rounded or trained further",
)
MOST_TENSORS_READ = _define(
    "MOST_TENSORS_READ", 64, unit="tensors", reason="of one shape, searched for a parameter that was loaded in place"
)
FIRST_ELEMENTS = _define(
    "FIRST_ELEMENTS", 64, unit="elements", reason="compared before the whole: random weights differ in them"
)
LONGEST_SHIFT = _define(
    "LONGEST_SHIFT", 3, unit="indices", reason="faults shift by one label or one token; each distance costs two passes"
)
FEWEST_SHIFTED = _define(
    "FEWEST_SHIFTED", 8, unit="indices", reason="rows that must overlap, or a shift leaves nothing to be compared"
)
SHIFTED_SHARE = _define(
    "SHIFTED_SHARE",
    0.5,
    unit="share of ||a - b||²",
    reason="must lie within the overlap, since the ends of a shifted tensor have no counterpart",
)
MOST_MATCHED = _define("MOST_MATCHED", 1 << 16, unit="rows", reason="looked for one by one; more take seconds to sort")
FEWEST_COLUMNS = _define(
    "FEWEST_COLUMNS", 8, unit="columns", reason="tell rows apart that are not equal to the bit; fewer reorder by noise"
)
MOVED = _define(
    "MOVED",
    0.1,
    unit="||a - b||² / ||a||² of the rows that moved",
    reason="rows that moved differ by about 2 times their size; noise alone reorders rows that are nearly equal",
)
KEPT_NORM = _define(
    "KEPT_NORM",
    0.1,
    unit="(||a|| - ||b||)² / ||a - b||²",
    reason="a permutation keeps the norm, to what noise adds",
)
BETTER_ORDER = _define(
    "BETTER_ORDER", 1e-6, unit="share of ||a - b||²", reason="an order must explain more than a simpler one before it"
)
LARGEST_DEGREE = _define(
    "LARGEST_DEGREE", 64, unit="pieces", reason="a dimension is tried in; larger degrees are no layout that is tested"
)
DECISION_UNITS = _define(
    "DECISION_UNITS",
    4,
    unit="units in the last place of float32",
    reason="steps of an expert's bias are one size, and elements are unmoved, to a few roundings of what keeps them",
)
ELEMENTS_OF_A_TOKEN = _define(
    "ELEMENTS_OF_A_TOKEN",
    2,
    unit="elements",
    reason="one token moves two counts: of the expert that it left, and of the one that it chose instead",
    source="arithmetic",
)

NAMED_ROWS = _define("NAMED_ROWS", 3, unit="rows", reason="of a batch that a finding names; it counts the others")

# --- Places -----------------------------------------------------------------------------------------------------------

ABOVE_MEDIAN = _define(
    "ABOVE_MEDIAN",
    25.0,
    unit="times the median square",
    reason="5 times as a norm, for places of which enough elements make up the difference",
)
FEW_ABOVE_MEDIAN = _define(
    "FEW_ABOVE_MEDIAN",
    1e4,
    unit="times the median square",
    reason="100 times as a norm, where so few elements make up a difference that their median may be small by chance",
)
ABOVE_OTHERS = _define(
    "ABOVE_OTHERS",
    4.0,
    unit="times the largest mean square of all other indices",
    reason="twice as a norm: where sizes vary widely, some indices always have a large difference and a small value",
)
PLACE_DEVIATIONS = _define(
    "PLACE_DEVIATIONS",
    5.5,
    unit="standard deviations",
    reason="one of 5e7 indices is so far off by chance; tensors have thousands",
    source="normal distribution; quantile of chi-squared by Wilson and Hilferty (1931)",
)
SMALLEST_SHARE = _define(
    "SMALLEST_SHARE", 0.01, unit="share of ||a - b||²", reason="a place that holds less is not worth reading"
)
SCATTERED_SHARE = _define(
    "SCATTERED_SHARE", 0.5, unit="share of ||a - b||²", reason="indices far apart are one place where they hold half"
)
SCATTERED_PART = _define(
    "SCATTERED_PART", 0.25, unit="of the indices", reason="and are no more than a quarter of the dimension"
)
NARROWER = _define(
    "NARROWER",
    0.95,
    unit="share of the difference of a rank's piece",
    reason="a narrower run that holds nearly all of it is reported instead of the piece",
)
MOST_LOCALITIES = _define("MOST_LOCALITIES", 4, unit="places", reason="of one tensor that are worth reading")
MOST_RUNS = _define("MOST_RUNS", 3, unit="runs of indices", reason="of one dimension that are worth reading")

# --- What hides within the noise --------------------------------------------------------------------------------------

LARGEST_Z = _define(
    "LARGEST_Z",
    5.0,
    unit="standard deviations",
    reason="honest layouts stay below 3.1 for one tensor; one of 2e6 is beyond by chance",
    source=_HONEST,
)
CALIBRATED_RUNS = _define(
    "CALIBRATED_RUNS",
    5,
    unit="perturbed runs",
    reason="limits of slopes were set with as many; a deviation or a largest value of fewer, n, is too small by up to "
    "the square root of 5 / n, by which the limit grows (2 runs: honest layouts reached 1.4 times the limit of two)",
    source=_HONEST,
)
LARGEST_SIGMA = _define(
    "LARGEST_SIGMA",
    3.0,
    unit="standard deviations of the sum of fair signs",
    reason="one series of 370 is beyond by chance; its mean must also be SAFETY times that of perturbed runs",
    source="binomial distribution",
)
FEWEST_SERIES = _define(
    "FEWEST_SERIES",
    LARGEST_SIGMA**2,
    unit="steps or updates",
    reason="of n steps the largest sigma is √n, so that no more than 9 can be beyond 3",
    source="arithmetic",
)
MOST_SUSPICIONS = _define("MOST_SUSPICIONS", 8, unit="places", reason="listed; one fault makes many of them")

# --- Behind equal inputs ----------------------------------------------------------------------------------------------

KERNEL_ROUNDINGS = _define(
    "KERNEL_ROUNDINGS",
    2.5,
    unit="unit roundoffs of what a kernel computes in",
    reason="a kernel rounds its result, and values such as probabilities or partial sums on the way to it: at most 0.8 "
    "in bfloat16 for another attention kernel, products in parts and another norm; a rotary base of 110 for 100 is 5",
    source="measured: align with these kernels as an entry, a model of two layers",
)
KERNEL_ACCUMULATION = _define(
    "KERNEL_ACCUMULATION",
    2.0**-14,
    unit="relative difference",
    reason="sums of float32 that cancel to a thousandth of their terms; one factor of TF32 (2^-11) is beyond",
)
KERNEL_LARGE_ELEMENT = _define(
    "KERNEL_LARGE_ELEMENT",
    8.0,
    unit="times the root mean square of a tensor",
    reason="an element of a sum that cancels has the rounding of its terms, and few terms are larger",
)
KERNEL_UPDATE = _define(
    "KERNEL_UPDATE",
    2.0**-10,
    unit="relative difference of the changes by one update",
    reason="an update is made in float32, element by element; an eighth of the spacing of bfloat16 is no rounding",
)
KERNEL_DIRECTION = _define(
    "KERNEL_DIRECTION",
    4.0,
    unit="standard deviations of rows and of columns",
    reason="both beyond by chance once in 1e8 tensors, were they independent; 2.1 at most for other kernels of "
    "attention, norms and products; 20 tokens moved to one side are 4.5",
    source="measured: align with these kernels as an entry, a model of two layers in bfloat16",
)
KERNEL_DENSITY = _define(
    "KERNEL_DENSITY",
    0.05,
    unit="of the elements of a row",
    reason="sums of float32 in another order move one element of bfloat16 in a thousand, and rounding on the way to a "
    "result a quarter of them",
    source="arithmetic",
)
KERNEL_EQUAL_ROWS = _define(
    "KERNEL_EQUAL_ROWS",
    0.4,
    unit="of the rows",
    reason="first tokens attend to themselves alone, which no kernel rounds: a row in five of short sequences; one of "
    "two data-parallel ranks has half",
)
KERNEL_SHARED = _define(
    "KERNEL_SHARED",
    8.0,
    unit="elements of a row that are rounded together",
    reason="a row shares a divisor, a probability or a scale",
)
KERNEL_EVIDENCE = _define(
    "KERNEL_EVIDENCE",
    20.0,
    unit="-log of a chance",
    reason="once in 5e8 tensors",
    source="arithmetic",
)
FACTOR_ROUNDING = _define(
    "FACTOR_ROUNDING",
    0.28,
    unit="2^-bits, relative difference of a product whose two factors are rounded to so many bits of mantissa",
    reason="an error evenly within half a spacing, of numbers spread over the powers of two: √(2 / (12 * 2.16)); "
    "0.31 was measured of linear layers in TF32",
    source="arithmetic; 'align' of a linear layer with TF32 inputs",
)
KERNEL_ROWS = _define(
    "KERNEL_ROWS",
    30,
    unit="rows",
    reason="that all of them are moved in one rank's piece and in none of another's is chance once in 2^30",
    source="arithmetic",
)

NORM_ROUNDING = _define(
    "NORM_ROUNDING",
    2.0**-16,
    unit="relative difference of a norm and the root of the squares that it is of",
    reason="a norm is added in float32, tensor by tensor, in every precision of the model: at most 1.8e-7 off for "
    "66,000 to 91,000 elements; SAFETY times the baseline's own where that is more",
    source="measured: metrics and traces of tests/alignment and of 60 runs in bfloat16",
)
NORM_HOLDS = _define(
    "NORM_HOLDS",
    2.0**-10,
    unit="relative difference, of the baseline",
    reason="a training whose own norm is another figure (of scaled gradients, of parts, or none at all) states no norm",
)
CLIP_HOLDS = _define(
    "CLIP_HOLDS",
    2.0**-10,
    unit="relative difference of a moment, and of a coefficient of the clip",
    reason="gradients are clipped and averaged in float32, element by element; an eighth of the spacing of bfloat16 is "
    "no rounding",
)
CLIP_EPSILON = _define(
    "CLIP_EPSILON",
    1e-6,
    unit="added to a norm before gradients are clipped by it",
    reason="Megatron clips by min(1, threshold / (norm + 1e-6))",
)
NORM_EXPLAINED = _define(
    "NORM_EXPLAINED",
    0.02,
    unit="of the excess of squares",
    reason="a sum of squares that explains the stated norm leaves its rounding",
)
MOST_NORM_GROUPS = _define(
    "MOST_NORM_GROUPS", 8, unit="kinds of tensors", reason="each subset of them is tried, and more would fit by chance"
)

REPEATED_SHARE = _define(
    "REPEATED_SHARE",
    0.1,
    unit="of the distance from the baseline",
    reason="a candidate that is this far from itself may be as far from the baseline by the same chance",
)

# --- What grew --------------------------------------------------------------------------------------------------------

NEARLY_BEYOND = _define(
    "NEARLY_BEYOND",
    0.03,
    unit="of the tolerance, at the update before",
    reason="a difference that was so near to its bound grew into it; only a reason says so, no verdict depends on it",
)
GREW_TENFOLD = _define(
    "GREW_TENFOLD",
    0.1,
    unit="of the difference at the update before, at the first update",
    reason="rounding that training amplifies begins smaller; only a reason says so, no verdict depends on it",
)

# --- Rollout and training log-probabilities of one policy version -----------------------------------------------------

AGREEMENT_FLOAT32 = _define(
    "AGREEMENT_FLOAT32",
    1e-4,
    unit="mean |log ratio| of tokens",
    reason="one policy in float32 on both sides differs by rounding, 5e-7 at most over 30 steps; TF32 is another type",
    source="measured: rollout_logprob_diff_max of frozen_lake",
)
ENGINE_FLOAT32 = _define(
    "ENGINE_FLOAT32",
    2e-5,
    unit="mean |log ratio| of tokens",
    reason="another program with the same weights in float32: of a policy that becomes sharp vLLM differs by 9.7e-7 in "
    "the mean of a step at most, and of one token by 4.4e-5; another step's weights by 1e-3 and more",
    source="measured: 390 steps of configs/qwen3_tiny_reasoning.yaml, vLLM 0.32.0 on CPU (docs/engines.md)",
)
ENGINE_MOVED = _define(
    "ENGINE_MOVED",
    5e-6,
    unit="|difference| of a log-probability of training's, largest of the probed tokens",
    reason="ten spacings of float32 between 4 and 8, where log-probabilities lie: weights that moved training's values "
    "by more leave no engine's values at the same bits",
    source="arithmetic",
)
ENGINE_MOVED_BFLOAT16 = _define(
    "ENGINE_MOVED_BFLOAT16",
    2.0**-4,
    unit="|difference| of a log-probability of training's, largest of the probed tokens",
    reason="two spacings of bfloat16 between 4 and 8, where logits lie: a smaller move may vanish in an engine's "
    "rounding",
    source="arithmetic",
)
AGREEMENT_BFLOAT16 = _define(
    "AGREEMENT_BFLOAT16",
    0.1,
    unit="mean |log ratio| of tokens",
    reason="of one policy with bfloat16 on a side it is 0.03 at most; where the type is not told it may be bfloat16",
    source="measured: rollout_logprob_diff_mean of frozen_lake_mismatch",
)
UNLIKE_OTHER_STEPS = _define(
    "UNLIKE_OTHER_STEPS",
    10.0,
    unit="times the median of the other steps, and of the other trajectories",
    reason="rounding grows with a sharper policy, within a recording by far less",
)
FEWEST_AGREEING = _define(
    "FEWEST_AGREEING", 16, unit="tokens", reason="below, the mean of a few outliers of bfloat16 says nothing of a kind"
)
EXPLAINED_SHARE = _define(
    "EXPLAINED_SHARE",
    0.25,
    unit="of the mean |log ratio|",
    reason="a cause that is right leaves rounding, one that is wrong about 1; chance makes no quarter of 16 tokens",
)
FEWEST_FITTED = _define(
    "FEWEST_FITTED", 64, unit="tokens", reason="of which a line of two numbers is fitted without following chance"
)
FITTED_SHARE = _define(
    "FITTED_SHARE",
    0.7,
    unit="of the mean |log ratio|",
    reason="a line over log-probabilities leaves 0.12 to 0.68 of another temperature (4 to 1,000 choices, 0.5 to 1.3) "
    "and 0.98 to 1 of other weights",
    source="measured: tests/correction/report/test_mismatch.py",
)
LEAST_SLOPE = _define(
    "LEAST_SLOPE", 0.02, unit="from 1", reason="a line of slope 1 is an offset, which no temperature makes"
)
FEWEST_LIKELIEST = _define(
    "FEWEST_LIKELIEST",
    0.1,
    unit="of the tokens",
    reason="of tokens sampled at any usual temperature more than a tenth are the likeliest one themselves",
)
MOST_CUT = _define(
    "MOST_CUT",
    0.7,
    unit="log of the kept mass, negative",
    reason="top-p and top-k that keep less than half of the mass are not in use",
)

# --- Advice on rollout correction -------------------------------------------------------------------------------------

_GUIDE = "verl's guide on rollout correction, as in docs/rollout_correction.md"

BIAS_ERRORS = _define(
    "BIAS_ERRORS",
    5.0,
    unit="standard errors of the mean ratio, from 1",
    reason="chance goes further once in 1.7 million steps; then recorded log-probabilities are of another distribution",
)
MOST_WEIGHT_SPREAD = _define(
    "MOST_WEIGHT_SPREAD", 1.0, unit="standard deviation of the weights", reason="a few tokens rule above", source=_GUIDE
)
LEAST_SAMPLES = _define(
    "LEAST_SAMPLES", 0.3, unit="effective share of the samples", reason="most samples are lost below", source=_GUIDE
)
LOWEST_MEAN_WEIGHT = _define(
    "LOWEST_MEAN_WEIGHT", 0.5, unit="mean weight", reason="the policies are apart below", source=_GUIDE
)
HIGHEST_MEAN_WEIGHT = _define(
    "HIGHEST_MEAN_WEIGHT", 2.0, unit="mean weight", reason="the policies are apart above", source=_GUIDE
)
MOST_VETOED = _define(
    "MOST_VETOED", 0.1, unit="of the sequences", reason="a veto is for the rare catastrophe", source=_GUIDE
)
MOST_MASKED = _define("MOST_MASKED", 0.5, unit="of the tokens", reason="most of the data is lost above", source=_GUIDE)
