/* The passes of a sketch over elements, for one kind of processor: native.h says which.
 *
 * Sums are made in eight lanes and without contraction to fused operations, so one call's have the same bits on every
 * processor.
 */
#include "native.h"

#define NUM_SLOTS 2039
#define BLOCK (NUM_SLOTS * 32)
#define LANES 8
#define VECTORS (LANES / WIDTH)
#define UPPER_HALF 0x9E3779B97F4A7C15u
#define AHEAD 2048 /* bytes: the processor by itself looks no further than the page of memory that it is in */

/* Sums of each lane. */
typedef struct {
    Doubles squares[VECTORS];
    Longs fingerprint[VECTORS], is_nan[VECTORS], is_infinite[VECTORS];
} Lanes;

/* One call's sums. lanes, columns: of the block that is summed now, without its sign and shift; NaN and infinities are
 * those of all blocks.
 */
typedef struct {
    const int64_t *constants; /* [BLOCK]: keys, whose lowest bit, 1 in any key, says where an element's sign is -1 */
    double *slots;            /* [NUM_SLOTS] */
    uint64_t block;
    double columns[NUM_SLOTS + LANES];
    Lanes lanes;
    double sum_of_squares;
    uint64_t sum_of_words;
} Sums;

INLINE uint64_t mix(uint64_t word) {
    word += 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* Adds the sums over the elements of one block to those of the whole, and begins anew. */
static void end_block(Sums *sums) {
    double sign = mix(mix(3) ^ sums->block) >> 63 ? -1.0 : 1.0;
    int64_t shift = (int64_t)(mix(mix(4) ^ sums->block) % NUM_SLOTS);
    for (int64_t column = 0; column < NUM_SLOTS - shift; column++) sums->slots[column + shift] += sign * sums->columns[column];
    for (int64_t column = NUM_SLOTS - shift; column < NUM_SLOTS; column++)
        sums->slots[column + shift - NUM_SLOTS] += sign * sums->columns[column];
    uint64_t words = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sums->sum_of_squares += sums->lanes.squares[lane / WIDTH][lane % WIDTH];
        words += (uint64_t)sums->lanes.fingerprint[lane / WIDTH][lane % WIDTH];
    }
    sums->sum_of_words += words * (mix(mix(5) ^ sums->block) | 1);
    memset(sums->columns, 0, sizeof sums->columns);
    memset(sums->lanes.squares, 0, sizeof sums->lanes.squares);
    memset(sums->lanes.fingerprint, 0, sizeof sums->lanes.fingerprint);
}

/* Adds WIDTH elements, of which one vector of the lanes, the columns and the constants begin with the first. */
INLINE void add_vector(Lanes *lanes, int vector, double *columns, const int64_t *constants, const char *elements,
                       int dtype, int is_masked) {
    Doubles values, sums;
    Longs words, constant;
    memcpy(&constant, constants, sizeof constant);
    memcpy(&sums, columns, sizeof sums);
    if (dtype == FLOAT64) {
        Longs bits;
        memcpy(&bits, elements, sizeof bits);
        words = (bits & 0xFFFFFFFF) + (bits >> 32) * (int64_t)UPPER_HALF;
        values = (Doubles)bits;
    } else {
        Ints bits;
        if (dtype == FLOAT32) {
            memcpy(&bits, elements, sizeof bits);
        } else {
            Shorts halves;
            memcpy(&halves, elements, sizeof halves);
            bits = EXTEND_SHORTS(halves);
        }
        words = EXTEND(bits);
        if (dtype == BFLOAT16) bits <<= 16;
        values = WIDEN((Floats)bits);
    }
    values = (Doubles)((Longs)values ^ (constant << 63));
    if (is_masked) {
        Longs size = (Longs)values & INT64_MAX, infinity = (Longs){0} + 0x7FF0000000000000;
        lanes->is_nan[vector] -= size > infinity;
        lanes->is_infinite[vector] -= size == infinity;
        values = (Doubles)((Longs)values & (size < infinity));
    }
    lanes->squares[vector] += values * values;
    lanes->fingerprint[vector] += (constant | 1) * words;
    sums += values;
    memcpy(columns, &sums, sizeof sums);
}

INLINE void add_lanes(Lanes *lanes, double *columns, const int64_t *constants, const char *elements, int dtype,
                      int is_masked) {
    for (int vector = 0; vector < VECTORS; vector++) {
        int first = vector * WIDTH;
        add_vector(lanes, vector, columns + first, constants + first, elements + first * size_of(dtype), dtype, is_masked);
    }
}

/* Adds elements that lie in one row of a block. */
INLINE void add_row(Sums *sums, const char *elements, int64_t place, int64_t length, int dtype, int is_masked) {
    int64_t size = size_of(dtype), done = 0;
    const int64_t *constants = sums->constants + place;
    double *columns = sums->columns + place % NUM_SLOTS;
    Lanes lanes = sums->lanes; /* which the compiler keeps in registers */
    for (; done + LANES <= length; done += LANES) {
        __builtin_prefetch(elements + done * size + AHEAD);
        add_lanes(&lanes, columns + done, constants + done, elements + done * size, dtype, is_masked);
    }
    if (done < length) {
        /* Zeros add nothing; the constants have LANES entries more than a block. */
        char rest[8 * LANES] = {0};
        memcpy(rest, elements + done * size, (length - done) * size);
        add_lanes(&lanes, columns + done, constants + done, rest, dtype, is_masked);
    }
    sums->lanes = lanes;
}

INLINE void add_all(Sums *sums, const char *elements, int64_t num_rows, int64_t row_bytes, int64_t length,
                    uint64_t start, uint64_t stride, int dtype, int is_masked) {
    int64_t size = size_of(dtype);
    for (int64_t row = 0; row < num_rows; row++) {
        const char *next = elements + row * row_bytes;
        uint64_t index = start + (uint64_t)row * stride;
        for (int64_t left = length; left > 0;) {
            uint64_t block = index / BLOCK;
            int64_t place = (int64_t)(index % BLOCK), part = NUM_SLOTS - place % NUM_SLOTS;
            if (part > left) part = left;
            if (block != sums->block) {
                end_block(sums);
                sums->block = block;
            }
            add_row(sums, next, place, part, dtype, is_masked);
            next += part * size;
            index += (uint64_t)part;
            left -= part;
        }
    }
}

/* As native.c says. */
void OF_KIND(sketch_rows)(const char *elements, int64_t num_rows, int64_t row_bytes, int64_t length, uint64_t start,
                          uint64_t stride, int dtype, int is_masked, const int64_t *constants, double *slots,
                          double *squares, int64_t *counts) {
    Sums sums = {.constants = constants, .slots = slots, .block = start / BLOCK};
#define ADD(TYPE, MASKED) add_all(&sums, elements, num_rows, row_bytes, length, start, stride, TYPE, MASKED)
    if (dtype == FLOAT32) is_masked ? ADD(FLOAT32, 1) : ADD(FLOAT32, 0);
    else if (dtype == BFLOAT16) is_masked ? ADD(BFLOAT16, 1) : ADD(BFLOAT16, 0);
    else is_masked ? ADD(FLOAT64, 1) : ADD(FLOAT64, 0);
#undef ADD
    end_block(&sums);
    *squares = sums.sum_of_squares;
    counts[0] = (int64_t)sums.sum_of_words;
    counts[1] = counts[2] = 0;
    for (int lane = 0; lane < LANES; lane++) {
        counts[1] += sums.lanes.is_nan[lane / WIDTH][lane % WIDTH];
        counts[2] += sums.lanes.is_infinite[lane / WIDTH][lane % WIDTH];
    }
}
