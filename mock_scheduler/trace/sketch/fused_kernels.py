"""Triton's kernels of ``fused``: the sums over one run of elements, in the order in which ``native.c`` adds them.

Apart, since importing it imports Triton, which only some builds of torch have. The names of arguments in capitals are
constants of a compilation.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201 - Triton reads these functions as programs of its own, without annotations

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_columns(
    bits_ptr,
    signs_ptr,
    keys_ptr,
    columns_ptr,
    squares_ptr,
    counts_ptr,
    offset,
    num_rows,
    length,
    stride,
    row_step,
    column_step,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    UPPER_HALF: tl.constexpr,
):
    """Sums the elements of one block, for TILE of its columns; rows from the first to the last."""
    block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    is_column = column < NUM_SLOTS
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    words = tl.zeros([TILE], tl.int64)
    is_nan, is_infinite = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for row in range(ROWS):
        place = row * NUM_SLOTS + column
        index = block * (ROWS * NUM_SLOTS) + place + offset
        line = index // stride
        at = index - line * stride
        is_here = is_column & (index >= 0) & (line < num_rows) & (at < length)
        bits = tl.load(bits_ptr + line * row_step + at * column_step, mask=is_here, other=0)
        if DTYPE == 2:
            word = (bits & 0xFFFFFFFF) + (bits >> 32) * UPPER_HALF
            value = bits.to(tl.float64, bitcast=True)
        else:
            word = bits.to(tl.int64)
            wide = bits.to(tl.int32)
            if DTYPE == 1:
                wide = wide << 16
            value = wide.to(tl.float32, bitcast=True).to(tl.float64)
        size = tl.abs(value)
        nan, infinite = value != value, size == float("inf")
        is_nan += nan.to(tl.int64)
        is_infinite += infinite.to(tl.int64)
        value = tl.where(nan | infinite, 0.0, value)
        squares += value * value
        words += tl.load(keys_ptr + place, mask=is_column, other=0) * word
        # A product with 1 or -1 is exact, so a fused operation rounds as the C file does.
        total += value * tl.load(signs_ptr + place, mask=is_column, other=0.0)
    tl.store(columns_ptr + block * NUM_SLOTS + column, total, mask=is_column)
    at_tile = block * tl.num_programs(1) + tile
    tl.store(squares_ptr + at_tile, tl.sum(squares, axis=0))
    tl.store(counts_ptr + 3 * at_tile, tl.sum(words, axis=0))
    tl.store(counts_ptr + 3 * at_tile + 1, tl.sum(is_nan, axis=0))
    tl.store(counts_ptr + 3 * at_tile + 2, tl.sum(is_infinite, axis=0))


@triton.jit
def turn_columns(columns_ptr, signs_ptr, shifts_ptr, edges_ptr, parts_ptr, NUM_SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Adds the columns of one part's blocks to its slots, block after block."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    is_slot = slot < NUM_SLOTS
    total = tl.zeros([TILE], tl.float64)
    for block in range(tl.load(edges_ptr + part), tl.load(edges_ptr + part + 1)):
        source = (slot - tl.load(shifts_ptr + block) + NUM_SLOTS) % NUM_SLOTS
        found = tl.load(columns_ptr + block * NUM_SLOTS + source, mask=is_slot, other=0.0)
        total += tl.load(signs_ptr + block) * found
    tl.store(parts_ptr + part * NUM_SLOTS + slot, total, mask=is_slot)


@triton.jit
def add_parts(parts_ptr, slots_ptr, num_parts, NUM_SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Adds the slots of all parts, part after part."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_slot = slot < NUM_SLOTS
    total = tl.zeros([TILE], tl.float64)
    for part in range(num_parts):
        total += tl.load(parts_ptr + part * NUM_SLOTS + slot, mask=is_slot, other=0.0)
    tl.store(slots_ptr + slot, total, mask=is_slot)
