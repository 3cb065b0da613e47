/* Sums a pair of tensors, and an update of both, in one pass each; figures.py and changes.py say what is summed, and have
 * the same in NumPy. Sums are made as lanes.py says, without contraction to fused operations, so they have the same bits
 * on every processor.
 */
#include "native.h"

#define HALF 8
#define LANES (2 * HALF)
#define PART 2048 /* elements that stay in the nearest cache: compared, summed and, if need be, searched */
#define INFINITE 0x7FF0000000000000

typedef int16_t Shorts __attribute__((vector_size(2 * HALF)));
typedef int32_t Ints __attribute__((vector_size(4 * HALF)));
typedef int16_t WideShorts __attribute__((vector_size(2 * LANES)));
typedef float Floats __attribute__((vector_size(4 * HALF)));
typedef int64_t Longs __attribute__((vector_size(8 * HALF)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));

/* Elements are read by groups of LANES, of each of which the lower half comes first. Where all are bfloat16, in PAIRS,
 * the even elements do, which need but be shifted.
 */
enum { LOW = 0, HIGH = 1, PAIRS = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 2 : 0 };

/* Loads float64. */
INLINE Longs load_longs(const char *group, int half) {
    Longs bits;
    memcpy(&bits, group + (half & HIGH) * sizeof bits, sizeof bits);
    return bits;
}

/* Loads float32 or bfloat16, as float32. */
INLINE Ints load_ints(const char *group, int dtype, int half) {
    Ints bits;
    if (half & PAIRS) {
        memcpy(&bits, group, sizeof bits);
        return half & HIGH ? bits & (int32_t)0xFFFF0000 : bits << 16;
    }
    if (dtype == FLOAT32) {
        memcpy(&bits, group + half * sizeof bits, sizeof bits);
        return bits;
    }
    Shorts halves;
    memcpy(&halves, group + half * sizeof halves, sizeof halves);
    return __builtin_convertvector(halves, Ints) << 16;
}

INLINE Doubles widen(Ints bits) { return __builtin_convertvector((Floats)bits, Doubles); }

INLINE Doubles load(const char *group, int dtype, int half) {
    return dtype == FLOAT64 ? (Doubles)load_longs(group, half) : widen(load_ints(group, dtype, half));
}

INLINE double load_one(const char *element, int dtype) {
    double wide;
    float narrow;
    uint32_t bits;
    uint16_t half;
    if (dtype == FLOAT64) {
        memcpy(&wide, element, sizeof wide);
        return wide;
    }
    if (dtype == FLOAT32) {
        memcpy(&narrow, element, sizeof narrow);
        return narrow;
    }
    memcpy(&half, element, sizeof half);
    bits = (uint32_t)half << 16;
    memcpy(&narrow, &bits, sizeof narrow);
    return narrow;
}

/* Adds the upper half of the lanes to the lower one, until one is left. */
INLINE double fold(Doubles low, Doubles high, int pairs) {
    double sums[LANES];
    for (int lane = 0; lane < HALF; lane++) {
        sums[pairs ? 2 * lane : lane] = low[lane];
        sums[pairs ? 2 * lane + 1 : lane + HALF] = high[lane];
    }
    for (int width = HALF; width; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}

typedef struct {
    Doubles mine, product, other, difference;
} Lanes;

/* Of one part. largest: |a - b| of each half as bits, which are ordered as the numbers are, with infinity and NaN above
 * them. The others have a field for each width of elements. num: with other bits; any width can count those of a part.
 * farthest: the numbers between a and b, less by the smallest of their type, so that they are compared with a sign.
 */
typedef struct {
    Longs largest[2], num, farthest;
    Ints num_ints, farthest_ints;
    WideShorts num_shorts, farthest_shorts;
} Extremes;

/* Bits in the order of the numbers, where both zeros are 0, are the magnitude, with the sign. */
#define DEFINE_ADD_BITS(NAME, VECTOR, SIGN, MAX)                               \
    INLINE void NAME(VECTOR *num, VECTOR *farthest, VECTOR a, VECTOR b) {      \
        VECTOR sign_a = a >> SIGN, sign_b = b >> SIGN;                         \
        *num -= a != b;                                                        \
        a = (a ^ (sign_a & MAX)) - sign_a;                                     \
        b = (b ^ (sign_b & MAX)) - sign_b;                                     \
        VECTOR is_less = a < b;                                                \
        VECTOR distance = (((a - b) ^ is_less) - is_less) ^ (-MAX - 1);        \
        VECTOR is_farther = distance > *farthest;                              \
        *farthest = (distance & is_farther) | (*farthest & ~is_farther);       \
    }

DEFINE_ADD_BITS(add_longs, Longs, 63, INT64_MAX)
DEFINE_ADD_BITS(add_ints, Ints, 31, INT32_MAX)
DEFINE_ADD_BITS(add_shorts, WideShorts, 15, INT16_MAX)

INLINE void add_pair(Lanes *lanes, Extremes *seen, const char *left, const char *right, int dtype, int half) {
    Doubles mine, other;
    if (dtype == FLOAT64) {
        Longs a = load_longs(left, half), b = load_longs(right, half);
        mine = (Doubles)a;
        other = (Doubles)b;
        add_longs(&seen->num, &seen->farthest, a, b);
    } else {
        Ints a = load_ints(left, dtype, half), b = load_ints(right, dtype, half);
        mine = widen(a);
        other = widen(b);
        if (dtype == FLOAT32) add_ints(&seen->num_ints, &seen->farthest_ints, a, b);
    }
    Doubles difference = mine - other;
    Longs size = (Longs)difference & INT64_MAX, *largest = &seen->largest[half & HIGH], is_larger = size > *largest;
    *largest = (size & is_larger) | (*largest & ~is_larger);
    lanes->mine += mine * mine;
    lanes->product += mine * other;
    lanes->other += other * other;
    lanes->difference += difference * difference;
}

/* Adds a group of elements. */
INLINE void add_group(Lanes *low, Lanes *high, Extremes *seen, const char *left, const char *right, int dtype, int pairs) {
    add_pair(low, seen, left, right, dtype, pairs | LOW);
    add_pair(high, seen, left, right, dtype, pairs | HIGH);
    if (dtype == BFLOAT16) {
        WideShorts a, b;
        memcpy(&a, left, sizeof a);
        memcpy(&b, right, sizeof b);
        add_shorts(&seen->num_shorts, &seen->farthest_shorts, a, b);
    }
}

INLINE void add_equal(Lanes *lanes, const char *group, int dtype, int half) {
    Doubles values = load(group, dtype, half), squares = values * values;
    lanes->mine += squares;
    lanes->product += squares;
    lanes->other += squares;
}

/* One call's results so far. first, worst: places, -1 where there is none. */
typedef struct {
    double squares[4];
    int64_t largest, num_different, first, worst;
    uint64_t max_ulp;
} PairSums;

/* Adds the extremes of the part that begins at a place; returns whether all of it is finite. */
INLINE int add_extremes(PairSums *sums, const Extremes *seen, const char *left, const char *right, int64_t place,
                        int64_t length, int dtype) {
    int64_t size = size_of(dtype), largest = 0;
    for (int lane = 0; lane < (dtype == BFLOAT16 ? LANES : HALF); lane++) {
        uint64_t distance = dtype == FLOAT64   ? (uint64_t)seen->farthest[lane] - (uint64_t)INT64_MIN
                            : dtype == FLOAT32 ? (uint64_t)((int64_t)seen->farthest_ints[lane] - INT32_MIN)
                                               : (uint64_t)((int64_t)seen->farthest_shorts[lane] - INT16_MIN);
        if (distance > sums->max_ulp) sums->max_ulp = distance;
        sums->num_different += dtype == FLOAT64   ? seen->num[lane]
                               : dtype == FLOAT32 ? seen->num_ints[lane]
                                                  : seen->num_shorts[lane];
    }
    for (int lane = 0; lane < LANES; lane++)
        if (seen->largest[lane / HALF][lane % HALF] > largest) largest = seen->largest[lane / HALF][lane % HALF];
    if (largest >= INFINITE) return 0;
    for (int64_t index = 0; sums->first < 0 && index < length; index++)
        if (memcmp(left + index * size, right + index * size, size)) sums->first = place + index;
    if (largest > sums->largest) {
        int64_t index = 0, bits;
        for (;; index++) {
            double difference = load_one(left + index * size, dtype) - load_one(right + index * size, dtype);
            memcpy(&bits, &difference, sizeof bits);
            if ((bits & INT64_MAX) == largest) break;
        }
        sums->largest = largest;
        sums->worst = place + index;
    }
    return 1;
}

INLINE int sum_pair_of(PairSums *sums, const char *left, const char *right, int64_t length, int64_t chunk, int dtype) {
    int64_t size = size_of(dtype);
    int pairs = dtype == BFLOAT16 ? PAIRS : 0;
    Lanes low = {0}, high = {0};
    for (int64_t start = 0, stop, chunk_stop = 0; start < length; start = stop) {
        if (start == chunk_stop) chunk_stop = length - start < chunk ? length : start + chunk;
        stop = chunk_stop - start < PART ? chunk_stop : start + PART;
        const char *a = left + start * size, *b = right + start * size;
        int64_t done = 0, num = stop - start, rest = num % LANES;
        char rest_a[8 * LANES] = {0}, rest_b[8 * LANES] = {0}; /* zeros add nothing */
        memcpy(rest_a, a + (num - rest) * size, rest * size);
        memcpy(rest_b, b + (num - rest) * size, rest * size);
        if (memcmp(a, b, num * size)) {
            Extremes seen = {.farthest = (Longs){0} + INT64_MIN,
                             .farthest_ints = (Ints){0} + INT32_MIN,
                             .farthest_shorts = (WideShorts){0} + INT16_MIN};
            for (; done + LANES <= num; done += LANES)
                add_group(&low, &high, &seen, a + done * size, b + done * size, dtype, pairs);
            add_group(&low, &high, &seen, rest_a, rest_b, dtype, pairs);
            if (!add_extremes(sums, &seen, a, b, start, num, dtype)) return 0;
        } else {
            for (; done + LANES <= num; done += LANES) {
                add_equal(&low, a + done * size, dtype, pairs | LOW);
                add_equal(&high, a + done * size, dtype, pairs | HIGH);
            }
            add_equal(&low, rest_a, dtype, pairs | LOW);
            add_equal(&high, rest_a, dtype, pairs | HIGH);
        }
        if (stop == chunk_stop) {
            sums->squares[0] += fold(low.mine, high.mine, pairs);
            sums->squares[1] += fold(low.product, high.product, pairs);
            sums->squares[2] += fold(low.other, high.other, pairs);
            sums->squares[3] += fold(low.difference, high.difference, pairs);
            low = high = (Lanes){0};
        }
    }
    for (int each = 0; each < 4; each++)
        if (!__builtin_isfinite(sums->squares[each])) return 0;
    return 1;
}

typedef struct {
    Doubles difference, size, rounding;
} ChangeLanes;

/* old, new and gradient: of the baseline, then of the candidate. */
typedef struct {
    const char *old[2], *new[2], *gradient[2];
} Sides;

/* Returns where an element has a say: all bits of it. */
INLINE Longs find_counted(const Sides *sides, int64_t offset, int dtype, int half, double significant) {
    const char *left = sides->gradient[0] + offset, *right = sides->gradient[1] + offset;
    if (dtype == FLOAT64) {
        Doubles mine = (Doubles)load_longs(left, half), distance = mine - (Doubles)load_longs(right, half);
        return (Doubles)((Longs)distance & INT64_MAX) <= (Doubles)((Longs)mine & INT64_MAX) * significant;
    }
    Floats mine = (Floats)load_ints(left, dtype, half), distance = mine - (Floats)load_ints(right, dtype, half);
    Ints is_counted = (Floats)((Ints)distance & INT32_MAX) <= (Floats)((Ints)mine & INT32_MAX) * (float)significant;
    return __builtin_convertvector(is_counted, Longs);
}

INLINE void add_change(ChangeLanes *lanes, Longs *num_excluded, const Sides *sides, int64_t index, int dtype,
                       int gradient_dtype, int half, double significant) {
    int64_t offset = index * size_of(dtype);
    Doubles mine = load(sides->new[0] + offset, dtype, half) - load(sides->old[0] + offset, dtype, half);
    Doubles other = load(sides->new[1] + offset, dtype, half) - load(sides->old[1] + offset, dtype, half);
    Doubles difference = other - mine, space;
    /* The power of two below a number: it without sign and mantissa. */
    if (dtype == FLOAT64) space = (Doubles)(load_longs(sides->new[0] + offset, half) & INFINITE);
    else space = widen(load_ints(sides->new[0] + offset, dtype, half) & 0x7F800000);
    if (gradient_dtype != NONE) {
        Longs is_counted = find_counted(sides, index * size_of(gradient_dtype), gradient_dtype, half, significant);
        *num_excluded += is_counted + 1;
        mine = (Doubles)((Longs)mine & is_counted);
        difference = (Doubles)((Longs)difference & is_counted);
        space = (Doubles)((Longs)space & is_counted);
    }
    lanes->difference += difference * difference;
    lanes->size += mine * mine;
    lanes->rounding += space * space;
}

/* Returns the sides' elements from an index on, behind which zeros follow: [6 * LANES * 8] bytes in rest. */
INLINE Sides copy_rest(const Sides *sides, char *rest, int64_t index, int64_t num, int dtype, int gradient_dtype) {
    Sides copy;
    memset(rest, 0, 6 * 8 * LANES);
    for (int side = 0; side < 2; side++) {
        int64_t size = size_of(dtype), gradient_size = size_of(gradient_dtype);
        char *next = rest + side * 3 * 8 * LANES;
        copy.old[side] = memcpy(next, sides->old[side] + index * size, num * size);
        copy.new[side] = memcpy(next + 8 * LANES, sides->new[side] + index * size, num * size);
        copy.gradient[side] = next + 2 * 8 * LANES;
        if (gradient_dtype != NONE)
            memcpy(next + 2 * 8 * LANES, sides->gradient[side] + index * gradient_size, num * gradient_size);
    }
    return copy;
}

INLINE int64_t sum_changes_of(double *sums, const Sides *sides, int64_t length, int64_t chunk, int dtype,
                              int gradient_dtype, double significant, double unit) {
    Longs num_excluded = {0};
    int pairs = dtype == BFLOAT16 && (gradient_dtype == NONE || gradient_dtype == BFLOAT16) ? PAIRS : 0;
    char rest[6 * 8 * LANES];
    for (int64_t start = 0, stop; start < length; start = stop) {
        ChangeLanes low = {0}, high = {0};
        stop = length - start < chunk ? length : start + chunk;
        int64_t whole = stop - (stop - start) % LANES;
        for (int64_t index = start; index < whole; index += LANES) {
            add_change(&low, &num_excluded, sides, index, dtype, gradient_dtype, pairs | LOW, significant);
            add_change(&high, &num_excluded, sides, index, dtype, gradient_dtype, pairs | HIGH, significant);
        }
        if (whole < stop) {
            Sides copy = copy_rest(sides, rest, whole, stop - whole, dtype, gradient_dtype);
            add_change(&low, &num_excluded, &copy, 0, dtype, gradient_dtype, pairs | LOW, significant);
            add_change(&high, &num_excluded, &copy, 0, dtype, gradient_dtype, pairs | HIGH, significant);
        }
        sums[0] += fold(low.difference, high.difference, pairs);
        sums[1] += fold(low.size, high.size, pairs);
        sums[2] += fold(low.rounding, high.rounding, pairs) * unit;
    }
    int64_t num = 0;
    for (int lane = 0; lane < HALF; lane++) num += num_excluded[lane];
    return num;
}

/* Sums the pairs of elements of two sides; returns 0, and writes nothing, where an element or a sum is not finite.
 *
 * chunk: elements that are summed by themselves. squares: [4], added to: <a,a>, <a,b>, <b,b>, ||a-b||². max_abs: [1].
 * counts: [4]: elements with other bits, the first of them, the first with the largest |a-b|, -1 where there is none,
 * and the largest number of numbers between a and b, unsigned.
 */
FOR_EACH_PROCESSOR
int sum_pair_1(const void *left, const void *right, int64_t length, int64_t chunk, int dtype, double *squares,
             double *max_abs, int64_t *counts) {
    PairSums sums = {.first = -1, .worst = -1};
    memcpy(sums.squares, squares, sizeof sums.squares);
#define SUM(TYPE) sum_pair_of(&sums, left, right, length, chunk, TYPE)
    if (!(dtype == FLOAT32 ? SUM(FLOAT32) : dtype == BFLOAT16 ? SUM(BFLOAT16) : SUM(FLOAT64))) return 0;
#undef SUM
    memcpy(squares, sums.squares, sizeof sums.squares);
    memcpy(max_abs, &sums.largest, sizeof *max_abs);
    counts[0] = sums.num_different;
    counts[1] = sums.first;
    counts[2] = sums.worst;
    counts[3] = (int64_t)sums.max_ulp;
    return 1;
}

/* Sums the changes from old to new; returns the number of elements left out. All are finite.
 *
 * sides: [6]: old, new and gradient of the baseline, then of the candidate. gradient_dtype: -1 where there are none.
 * unit: the square of the spacing of the numbers at 1. sums: [3], added to: ||d_a-d_b||², ||d_a||², of the spacings.
 */
FOR_EACH_PROCESSOR
int64_t sum_changes_1(const char *const *sides, int64_t length, int64_t chunk, int dtype, int gradient_dtype,
                    double significant, double unit, double *sums) {
    Sides both = {{sides[0], sides[3]}, {sides[1], sides[4]}, {sides[2], sides[5]}};
#define SUM(TYPE, GRADIENT) return sum_changes_of(sums, &both, length, chunk, TYPE, GRADIENT, significant, unit)
#define SUM_BY_GRADIENT(TYPE)                              \
    do {                                                   \
        if (gradient_dtype == NONE) SUM(TYPE, NONE);       \
        if (gradient_dtype == FLOAT32) SUM(TYPE, FLOAT32); \
        if (gradient_dtype == BFLOAT16) SUM(TYPE, BFLOAT16); \
        SUM(TYPE, FLOAT64);                                \
    } while (0)
    if (dtype == FLOAT32) SUM_BY_GRADIENT(FLOAT32);
    if (dtype == BFLOAT16) SUM_BY_GRADIENT(BFLOAT16);
    SUM_BY_GRADIENT(FLOAT64);
}
