"""Sketches: they add up over every sharding, their error bar holds, and their fingerprint sees every change of bits."""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.shards import (
    Block,
    ShardSpec,
    Split,
    blocks_of_indices,
    cut_shard,
    even_split,
    whole,
)
from mock_scheduler.trace.sketch import sums as sketch_sums
from mock_scheduler.trace.sketch.constants import BLOCK, NUM_SLOTS
from mock_scheduler.trace.sketch.sketch import (
    Estimate,
    Sketch,
    add,
    difference,
    finish_sketches,
    relative_bounds,
    rounding_bound,
    sketch_of,
    sketch_piece,
)
from mock_scheduler.trace.sketch.sums import SketchSums

_MASK = (1 << 64) - 1
NUM_PAIRS = 400


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def split_spec(shape: tuple[int, ...], *splits: Split, flat_range: tuple[int, int] | None = None) -> ShardSpec:
    local = list(shape)
    for split in splits:
        local[split.dim] = max(block.local_start + block.length for block in split.blocks)
    return ShardSpec(name="w", global_shape=shape, local_shape=tuple(local), splits=splits, flat_range=flat_range)


def assert_same(found: Sketch, expected: Sketch) -> None:
    """Exactly in what is counted, and to rounding in what is summed."""
    assert found.is_identical(expected)
    assert (found.num_nan, found.num_infinite) == (expected.num_nan, expected.num_infinite)
    bound = rounding_bound(expected.norm, expected.num_elements)
    assert float(torch.linalg.vector_norm(found.sums - expected.sums)) <= bound
    assert found.sum_of_squares == pytest.approx(expected.sum_of_squares, rel=1e-12)


def add_up(tensor: torch.Tensor, specs: list[ShardSpec]) -> Sketch:
    pieces = [sketch_piece(cut_shard(tensor, spec), spec) for spec in specs]
    total = pieces[0]
    for piece in pieces[1:]:
        total = add(total, piece)
    return total


def test_a_sketch_is_what_its_constants_say() -> None:
    """An independent program in plain integers, from the formulas in the docstrings."""

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
        return z ^ z >> 31

    def random(stream: int, index: int) -> int:
        return mix(mix(stream) ^ index)

    def sign(word: int) -> int:
        return -1 if word >> 63 else 1

    start, values = 3 * BLOCK - 2, [1.5, -2.25, 0.5, 8.0]
    tensor = torch.zeros(start + 4)
    tensor[start:] = torch.tensor(values)
    bits = np.array(values, dtype=np.float32).view(np.int32).tolist()
    sums, fingerprint = [0.0] * 8, 0
    for index, value, word in zip(range(start, start + 4), values, bits, strict=True):
        block, place = divmod(index, BLOCK)
        slot = (place + random(4, block) % NUM_SLOTS) % NUM_SLOTS
        signed = value * sign(random(1, place)) * sign(random(3, block))
        for bucket in range(8):
            sums[bucket] += signed * sign(random(6, slot * 4096 + bucket)) / math.sqrt(8)
        fingerprint += (random(2, place) | 1) * (random(5, block) | 1) * word
    dtype_factor = int.from_bytes(hashlib.sha256(b"float32").digest()[:8], "little") | 1
    found = sketch_of(tensor, num_buckets=8)
    assert found.sums.tolist() == pytest.approx(sums)
    assert found.fingerprint == fingerprint * dtype_factor % (1 << 64)
    assert found.sum_of_squares == 1.5**2 + 2.25**2 + 0.5**2 + 64.0


SHARDINGS: dict[str, tuple[tuple[int, ...], list[ShardSpec]]] = {
    "tp rows": ((6, 50), [split_spec((6, 50), *even_split(0, size=6, rank=r, num_ranks=3)) for r in range(3)]),
    "tp columns": (
        (700, 200),
        [split_spec((700, 200), *even_split(1, size=200, rank=r, num_ranks=4)) for r in range(4)],
    ),
    "gated": (
        (8, 30),
        [split_spec((8, 30), *even_split(0, size=8, rank=r, num_ranks=2, num_parts=2)) for r in range(2)],
    ),
    "gated columns": (
        (300, 16),
        [split_spec((300, 16), *even_split(1, size=16, rank=r, num_ranks=2, num_parts=2)) for r in range(2)],
    ),
    "tokens of two ranks": (
        (20, 7),
        [
            split_spec((20, 7), Split(dim=0, blocks=blocks_of_indices(indices)))
            for indices in ([0, 1, 2, 9, 10, 18, 19], [3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17])
        ],
    ),
    "tokens and heads": (
        (40, 6, 5),
        [
            split_spec(
                (40, 6, 5), Split(dim=0, blocks=blocks_of_indices(indices)), *even_split(1, size=6, rank=r, num_ranks=2)
            )
            for indices in (list(range(0, 40, 2)), list(range(1, 40, 2)))
            for r in range(2)
        ],
    ),
    "heads and channels": (
        (30, 4, 6, 8),
        [
            split_spec(
                (30, 4, 6, 8),
                *even_split(1, size=4, rank=a, num_ranks=2),
                *even_split(3, size=8, rank=b, num_ranks=2),
            )
            for a in range(2)
            for b in range(2)
        ],
    ),
    "rows of several blocks": (
        (3, BLOCK + 11),
        [split_spec((3, BLOCK + 11), *even_split(0, size=3, rank=r, num_ranks=3)) for r in range(3)],
    ),
    "experts": ((8, 9, 11), [split_spec((8, 9, 11), *even_split(0, size=8, rank=r, num_ranks=4)) for r in range(4)]),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_sketches_of_shards_add_up_to_that_of_the_whole(sharding: str, dtype: torch.dtype) -> None:
    shape, specs = SHARDINGS[sharding]
    tensor = (1000 * normal(1, *shape)).to(dtype)
    assert_same(add_up(tensor, specs), sketch_of(tensor))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sketches_of_any_flat_ranges_add_up_to_that_of_the_whole(data: st.DataObject) -> None:
    shape = (12, 5, 4)
    tensor = normal(2, *shape)
    total = None
    for rank in range(2):
        plain = split_spec(shape, *even_split(0, size=12, rank=rank, num_ranks=2, num_parts=2))
        local = cut_shard(tensor, plain).reshape(-1)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(local)), max_size=4)))
        for start, stop in zip([0, *cuts], [*cuts, len(local)], strict=True):
            spec = split_spec(shape, *plain.splits, flat_range=(start, stop))
            piece = local[start:stop] if data.draw(st.booleans()) else local.view(plain.local_shape)
            sketch = sketch_piece(piece, spec)
            assert sketch.num_elements == stop - start
            total = sketch if total is None else add(total, sketch)
    assert total is not None
    assert_same(total, sketch_of(tensor))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    dim=st.integers(0, 3),
    owners=st.lists(st.integers(0, 2), min_size=9, max_size=9),
)
def test_sketches_of_any_blocks_of_any_dimension_add_up(shape: list[int], dim: int, owners: list[int]) -> None:
    tensor = normal(3, *shape)
    if not shape:
        assert sketch_of(tensor).sum_of_squares == float(tensor.double()) ** 2
        return
    dim %= len(shape)
    owned = [[index for index in range(shape[dim]) if owners[index] == rank] for rank in range(3)]
    specs = [split_spec(tuple(shape), Split(dim=dim, blocks=blocks_of_indices(own))) for own in owned if own]
    assert_same(add_up(tensor, specs), sketch_of(tensor))


def test_vocabulary_padding_is_in_no_sketch() -> None:
    tensor = normal(4, 5, 6)
    padded = torch.cat([tensor, torch.full((3, 6), math.nan)])
    spec = ShardSpec(
        name="w",
        global_shape=(5, 6),
        local_shape=(8, 6),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=0, length=5),)),),
    )
    assert_same(sketch_piece(padded, spec), sketch_of(tensor))


def test_how_a_piece_lies_in_memory_does_not_matter() -> None:
    tensor = normal(14, 30, 40)
    strided = torch.stack([tensor, tensor + 1], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    for view in (strided, tensor.t().contiguous().t()):
        assert_same(sketch_of(view), sketch_of(tensor))
    assert_same(sketch_of(strided[3]), sketch_of(tensor[3]))
    assert_same(sketch_of(torch.ones(1, 1).expand(3, 7)), sketch_of(torch.ones(3, 7)))


def test_what_is_computed_without_the_host_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that CUDA tensors take, here on the CPU: windows of many blocks at once."""
    tensor = normal(5, 5, BLOCK + 77)
    tensor[2, 5] = math.nan
    expected = sketch_of(tensor)
    monkeypatch.setattr(sketch_sums, "_BLOCKS_ON_DEVICE", 2)
    monkeypatch.setattr(sketch_sums, "_is_host", lambda device: False)
    assert_same(sketch_of(tensor), expected)


def test_the_same_tensor_gives_the_same_bits_with_any_number_of_threads_but_rounding() -> None:
    tensor = normal(6, 4, BLOCK)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sketch_of(tensor)
        assert torch.equal(sketch_of(tensor).sums, one.sums)
        torch.set_num_threads(3)
        assert_same(sketch_of(tensor), one)
    finally:
        torch.set_num_threads(before)


Pair = tuple[torch.Tensor, torch.Tensor]


def _index(seed: int, size: int) -> int:
    return int(torch.randint(size, (1,), generator=generator(seed)))


def _sparse(seed: int) -> torch.Tensor:
    return normal(seed, 40, 128) * (torch.rand(40, 128, generator=generator(seed + 1)) < 0.004)


def _few(seed: int, count: int) -> torch.Tensor:
    flat = torch.zeros(40 * 128)
    flat[torch.randperm(40 * 128, generator=generator(seed))[:count]] = 1.0
    return flat.view(40, 128)


def _row(seed: int) -> torch.Tensor:
    return torch.zeros(40, 128).index_fill_(0, torch.tensor(_index(seed, 40)), 1.0) * normal(seed, 40, 128)


def _column(seed: int) -> torch.Tensor:
    return torch.zeros(160, 64).index_fill_(1, torch.tensor(_index(seed, 64)), 1.0) * normal(seed, 160, 64)


FAMILIES: dict[str, Callable[[int], torch.Tensor]] = {
    "dense": lambda seed: normal(seed, 40, 128),
    "sparse": _sparse,
    "one element": lambda seed: _few(seed, 1),
    "two equal elements": lambda seed: _few(seed, 2),
    "four equal elements": lambda seed: _few(seed, 4),
    "ten equal elements": lambda seed: _few(seed, 10),
    "one row": _row,
    "one column": _column,
    "rank one": lambda seed: torch.outer(normal(seed, 40), normal(seed + 1, 128)),
    "heavy tails": lambda seed: normal(seed, 40, 128) ** 9,
}


def coverage_of(pairs: list[Pair]) -> float:
    """In how many of the cases the true relative difference is within the error bar."""
    hits = 0
    for baseline, candidate in pairs:
        sums = [SketchSums(baseline.dtype, baseline.device), SketchSums(candidate.dtype, candidate.device)]
        for one, tensor in zip(sums, (baseline, candidate), strict=True):
            one.add(tensor, whole("w", tuple(tensor.shape)))
        estimate = difference(*finish_sketches(sums, num_buckets=64))
        reference = baseline.double()
        true = float((reference - candidate.double()).norm() / reference.norm())
        hits += estimate.low <= true <= estimate.high
    return hits / len(pairs)


def scaled_pair(family: str, seed: int) -> Pair:
    """A float64 pair whose relative difference is 10^0 to 10^-9, evenly by exponent."""
    change = FAMILIES[family](seed).double()
    baseline = normal(seed + 7_000_000, *change.shape, dtype=torch.float64)
    relative = 10.0 ** (-9.0 * (seed % NUM_PAIRS) / (NUM_PAIRS - 1))
    return baseline, baseline + change * (relative * baseline.norm() / change.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_bar_holds_in_95_percent_of_differences_from_1e_9_to_1(family: str) -> None:
    seeds = range(NUM_PAIRS * 100, NUM_PAIRS * 101)
    assert coverage_of([scaled_pair(family, seed) for seed in seeds]) >= 0.95


def _scaled(seed: int) -> Pair:
    baseline = normal(seed, 64, 64)
    return baseline, baseline * 1.01


def _permuted(seed: int) -> Pair:
    baseline = normal(seed, 64, 64)
    return baseline, baseline.view(-1)[torch.randperm(64 * 64, generator=generator(seed))].view(64, 64)


def _rounded_gemm(seed: int) -> Pair:
    """The output of a matrix product in float32, and rounded to bfloat16."""
    output = normal(seed, 64, 48) @ normal(seed + 1, 48, 64)
    return output, output.bfloat16()


def _split_gemm(seed: int) -> Pair:
    """A matrix product whose inner dimension is summed at once, and in two halves as tp2 does."""
    left, right = normal(seed, 64, 96), normal(seed + 1, 96, 64)
    return left @ right, left[:, :48] @ right[:48] + left[:, 48:] @ right[48:]


@pytest.mark.parametrize("make", [_scaled, _permuted, _rounded_gemm, _split_gemm])
def test_the_error_bar_holds_for_real_pairs(make: Callable[[int], Pair]) -> None:
    assert coverage_of([make(10 * seed) for seed in range(NUM_PAIRS)]) >= 0.95


def test_the_error_bar_is_a_quarter_wide_with_64_buckets_and_narrower_with_more() -> None:
    """sqrt(62.05 / chi²), whose quantiles at 1 % and 99 % are 39.10 and 90.86."""
    assert relative_bounds(64) == pytest.approx((0.8264, 1.2598), rel=2e-3)
    low, high = relative_bounds(1024)
    assert 0.93 < low < 1.0 < high < 1.07


def test_a_single_element_is_estimated_exactly() -> None:
    baseline = torch.zeros(1000)
    baseline[3] = 4.0
    candidate = baseline.clone()
    candidate[700] = 2.0
    estimate = difference(sketch_of(baseline), sketch_of(candidate))
    assert estimate.norm_difference == pytest.approx(2.0)
    assert estimate.low < 0.5 < estimate.high
    assert estimate.relative == pytest.approx(0.5)


def test_sums_of_other_orders_are_never_told_apart_from_equal_ones() -> None:
    """The last bit of one element of 10^4 is below what rounding leaves, so the bar begins at 0."""
    baseline = normal(8, 100, 100, dtype=torch.float64)
    candidate = baseline.clone()
    candidate[3, 3] = torch.nextafter(candidate[3, 3], torch.tensor(9.0, dtype=torch.float64))
    estimate = difference(sketch_of(baseline), sketch_of(candidate))
    assert estimate.low == 0.0
    assert 0.0 < estimate.high < 1e-12


def test_equal_bits_have_no_difference_and_no_error_bar() -> None:
    tensor = normal(9, 30)
    assert difference(sketch_of(tensor), sketch_of(tensor.clone())) == Estimate(
        norm_difference=0.0, relative=0.0, low=0.0, high=0.0
    )


def test_against_zeros_a_difference_is_infinite_and_none_is_none() -> None:
    zeros, ones = sketch_of(torch.zeros(5)), sketch_of(torch.ones(5))
    assert difference(zeros, ones).relative == math.inf
    assert difference(zeros, sketch_of(torch.zeros(5, dtype=torch.float64))).high == 0.0


@pytest.mark.parametrize("scale", [1e-170, 1e-160])
def test_squares_that_underflow_leave_the_bounds_open(scale: float) -> None:
    """The norms of both were 0, and with them estimate and upper bound, although all elements differed."""
    baseline = torch.full((100,), scale, dtype=torch.float64)
    estimate = difference(sketch_of(baseline), sketch_of(baseline * 1.5))
    assert estimate.relative == pytest.approx(0.5, rel=1e-9)
    assert (estimate.low, estimate.high) == (0.0, math.inf)


def test_squares_that_overflow_leave_the_bounds_open() -> None:
    baseline = torch.full((100,), 1e300, dtype=torch.float64)
    estimate = difference(sketch_of(baseline), sketch_of(baseline * 1.5))
    assert (estimate.relative, estimate.low, estimate.high) == (math.inf, 0.0, math.inf)


@pytest.mark.parametrize("bits", [(0x00000000, 0x80000000), (0x7FC00000, 0x7FC00001), (0x00000001, 0x00000002)])
def test_bits_that_compare_equal_or_as_nothing_have_other_fingerprints(bits: tuple[int, int]) -> None:
    """Zeros of both signs, NaN with other payloads, denormal numbers."""
    one, other = (sketch_of(torch.tensor([word], dtype=torch.uint32).view(torch.float32)) for word in bits)
    assert not one.is_identical(other)


def test_sketches_of_other_numbers_of_buckets_are_refused() -> None:
    with pytest.raises(TraceError) as caught:
        difference(sketch_of(torch.ones(3)), sketch_of(torch.ones(3), num_buckets=32))
    assert str(caught.value) == (
        "sketches with 64 and 32 buckets cannot be compared; run both with the same trace.sketch_buckets"
    )


def _change_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])[17] ^= 1


def _swap(tensor: torch.Tensor) -> None:
    tensor[0, 0], tensor[3, 7] = tensor[3, 7].clone(), tensor[0, 0].clone()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one bit": _change_a_bit,
    "a swap of two": _swap,
    "the sign of one": lambda tensor: tensor[2].neg_(),
    "all signs": lambda tensor: tensor.neg_(),
    "a permutation of rows": lambda tensor: tensor.copy_(tensor.flip(0)),
    "a permutation of columns": lambda tensor: tensor.copy_(tensor.flip(1)),
    "a shift": lambda tensor: tensor.copy_(tensor.roll(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees(change: str, dtype: torch.dtype) -> None:
    tensor = normal(11, 40, 64, dtype=dtype)
    changed = tensor.clone()
    CHANGES[change](changed)
    assert not torch.equal(changed, tensor)
    assert not sketch_of(changed).is_identical(sketch_of(tensor))
    assert sketch_of(tensor.clone()).is_identical(sketch_of(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fingerprint_sees_signs_of_zeros_and_of_powers_of_two(dtype: torch.dtype) -> None:
    """Words that differ in their highest bit only: two of them must not cancel."""
    plain = sketch_of(torch.zeros(500, dtype=dtype))
    seen = {
        sketch_of(torch.zeros(500, dtype=dtype).index_fill_(0, torch.tensor([0, i]), -0.0)).fingerprint
        for i in range(1, 300)
    }
    assert len(seen) == 299
    assert plain.fingerprint not in seen
    powers = 2.0 ** torch.arange(-4, 5, dtype=torch.float64).repeat(50).to(dtype)
    assert not sketch_of(powers.flip(0)).is_identical(sketch_of(powers))


def test_the_fingerprint_is_tagged_with_the_dtype() -> None:
    bits = torch.tensor([1, 2, 3], dtype=torch.int16)
    found = {sketch_of(bits.view(dtype)).fingerprint for dtype in (torch.int16, torch.float16, torch.bfloat16)}
    assert len(found) == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16])
def test_other_dtypes_are_summed_too(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    assert sketch_of(tensor).sum_of_squares == 4.0


def test_nan_and_infinities_are_counted_and_poison_nothing() -> None:
    clean = normal(12, 50, 50)
    clean[1, 2] = clean[3, 4] = clean[5, 6] = 0.0
    dirty = clean.clone()
    dirty[1, 2], dirty[3, 4], dirty[5, 6] = math.nan, math.inf, -math.inf
    found, expected = sketch_of(dirty), sketch_of(clean)
    assert (found.num_nan, found.num_infinite) == (1, 2)
    assert torch.equal(found.sums, expected.sums)
    # Without a compiler torch adds what has infinities in another way.
    rounding = 0.0 if sketch_sums.can_sum(clean.dtype) else 1e-12
    assert found.sum_of_squares == pytest.approx(expected.sum_of_squares, rel=rounding, abs=0.0)
    assert not found.is_identical(expected)
    assert sketch_of(dirty.clone()).is_identical(found)


def test_of_a_tensor_with_gaps_only_what_is_present_counts() -> None:
    tensor = normal(13, 6, 5)
    present = torch.tensor([True, True, False, True, False, True]).view(6, 1)
    filled = tensor.clone()
    filled[2] = math.nan
    spec = split_spec((6, 5), Split(dim=0, blocks=blocks_of_indices([0, 1, 3, 5])))
    assert_same(
        sketch_of(filled.index_fill(0, torch.tensor(4), 3.0), present), sketch_piece(tensor[[0, 1, 3, 5]], spec)
    )


def test_a_complex_tensor_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(TraceError, match=r"a tensor of torch.complex64 has no sketch"):
        sketch_of(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TraceError) as caught:
        sketch_piece(torch.zeros(3), split_spec((4,), flat_range=(1, 3)))
    assert str(caught.value) == "w has shape [3], its shard spec says [4] or [2]"
    with pytest.raises(TraceError, match=r"1 to 4096 buckets, not 0"):
        sketch_of(torch.zeros(3), num_buckets=0)
