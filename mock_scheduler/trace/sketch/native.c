/* Sums elements into the parts of a sketch; constants.py and sketch.py say what is summed. host.py calls it, and has the
 * same in torch for where this is not built. Elements are read once, where they lie. Sums are made in eight lanes and
 * without contraction to fused operations, so one call's have the same bits on every processor.
 */
#include "native.h"

#define NUM_SLOTS 2039
#define BLOCK (NUM_SLOTS * 32)
#define LANES 8
#define UPPER_HALF 0x9E3779B97F4A7C15u

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int64_t Longs __attribute__((vector_size(8 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES)));

/* One call's sums. columns: of the block that is summed now, without its sign and shift. */
typedef struct {
    const uint8_t *signs; /* [BLOCK]: 0x80 where an element's sign is -1 */
    const int64_t *keys;  /* [BLOCK] */
    double *slots;        /* [NUM_SLOTS] */
    uint64_t block;
    double columns[NUM_SLOTS + LANES];
    Doubles squares;
    Longs fingerprint, is_nan, is_infinite;
    double sum_of_squares;
    uint64_t sum_of_words;
} Sums;

static uint64_t mix(uint64_t word) {
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
        sums->sum_of_squares += sums->squares[lane];
        words += (uint64_t)sums->fingerprint[lane];
    }
    sums->sum_of_words += words * (mix(mix(5) ^ sums->block) | 1);
    memset(sums->columns, 0, sizeof sums->columns);
    sums->squares = (Doubles){0};
    sums->fingerprint = (Longs){0};
}

/* Adds LANES elements that stand at one place of their block and the next ones. */
INLINE void add_lanes(Sums *sums, const char *elements, int64_t place, int64_t column, int dtype, int is_masked) {
    Doubles values, columns;
    Longs words, keys;
    Bytes signs;
    memcpy(&signs, sums->signs + place, sizeof signs);
    memcpy(&keys, sums->keys + place, sizeof keys);
    memcpy(&columns, sums->columns + column, sizeof columns);
    if (dtype == FLOAT64) {
        Longs bits;
        memcpy(&bits, elements, sizeof bits);
        words = (bits & 0xFFFFFFFF) + (bits >> 32) * (int64_t)UPPER_HALF;
        values = (Doubles)(bits ^ (__builtin_convertvector(signs, Longs) << 56));
    } else {
        Ints bits;
        if (dtype == FLOAT32) {
            memcpy(&bits, elements, sizeof bits);
        } else {
            Shorts halves;
            memcpy(&halves, elements, sizeof halves);
            bits = __builtin_convertvector(halves, Ints);
        }
        words = __builtin_convertvector(bits, Longs);
        if (dtype == BFLOAT16) bits <<= 16;
        values = __builtin_convertvector((Floats)(bits ^ (__builtin_convertvector(signs, Ints) << 24)), Doubles);
    }
    if (is_masked) {
        Longs size = (Longs)values & INT64_MAX, infinity = (Longs){0} + 0x7FF0000000000000;
        sums->is_nan -= size > infinity;
        sums->is_infinite -= size == infinity;
        values = (Doubles)((Longs)values & (size < infinity));
    }
    sums->squares += values * values;
    sums->fingerprint += keys * words;
    columns += values;
    memcpy(sums->columns + column, &columns, sizeof columns);
}

/* Adds elements that lie in one row of a block. */
INLINE void add_row(Sums *sums, const char *elements, int64_t place, int64_t length, int dtype, int is_masked) {
    int64_t size = size_of(dtype);
    int64_t column = place % NUM_SLOTS, done = 0;
    for (; done + LANES <= length; done += LANES)
        add_lanes(sums, elements + done * size, place + done, column + done, dtype, is_masked);
    if (done < length) {
        /* Zeros add nothing; signs and keys have LANES entries more than a block. */
        char rest[8 * LANES] = {0};
        memcpy(rest, elements + done * size, (length - done) * size);
        add_lanes(sums, rest, place + done, column + done, dtype, is_masked);
    }
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

/* Its name ends in a version: raise it, here and in host.py, with any change of arguments or of sums.
 *
 * Adds rows of elements, of which row r begins at the canonical index start + r * stride.
 *
 * signs, keys: [BLOCK + LANES]. slots: added to. squares: [1], counts: [3]: the fingerprint, NaN, infinities; written.
 * is_masked: NaN and infinities are counted, and add 0; else they are not looked for, and make the squares so too.
 */
FOR_EACH_PROCESSOR
void sketch_rows_1(const void *elements, int64_t num_rows, int64_t row_bytes, int64_t length, uint64_t start,
                   uint64_t stride, int dtype, int is_masked, const uint8_t *signs, const int64_t *keys, double *slots,
                   double *squares, int64_t *counts) {
    Sums sums = {.signs = signs, .keys = keys, .slots = slots, .block = start / BLOCK};
#define ADD(TYPE, MASKED) add_all(&sums, elements, num_rows, row_bytes, length, start, stride, TYPE, MASKED)
    if (dtype == FLOAT32) is_masked ? ADD(FLOAT32, 1) : ADD(FLOAT32, 0);
    else if (dtype == BFLOAT16) is_masked ? ADD(BFLOAT16, 1) : ADD(BFLOAT16, 0);
    else is_masked ? ADD(FLOAT64, 1) : ADD(FLOAT64, 0);
    end_block(&sums);
    *squares = sums.sum_of_squares;
    counts[0] = (int64_t)sums.sum_of_words;
    counts[1] = counts[2] = 0;
    for (int lane = 0; lane < LANES; lane++) {
        counts[1] += sums.is_nan[lane];
        counts[2] += sums.is_infinite[lane];
    }
}
