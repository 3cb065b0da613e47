/* The passes over tensors, for one kind of processor: native.h says which.
 *
 * Sums are made as lanes.py says, so they have the same bits on every processor. A product is fused with its sum only
 * where it is exact in float64, as products of float32 and bfloat16 are.
 */
#include "native.h"

#define LANES 16
#define VECTORS (LANES / WIDTH)
#define PART 2048 /* elements that stay in the nearest cache: compared, summed and, if need be, searched */
#define INFINITE 0x7FF0000000000000

/* Elements are read by groups of LANES, in vectors. Where all are bfloat16, the first of two vectors has the even
 * elements and the second the odd ones, which need but be shifted.
 */
enum { CAN_PAIR = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ };

INLINE int lane_of(int vector, int place, int pairs) {
    return pairs ? (vector & ~1) * WIDTH + 2 * place + (vector & 1) : vector * WIDTH + place;
}

/* Loads float64. */
INLINE Longs load_longs(const char *group, int vector) {
    Longs bits;
    memcpy(&bits, group + vector * sizeof bits, sizeof bits);
    return bits;
}

/* Loads float32 or bfloat16, as float32. */
INLINE Ints load_ints(const char *group, int dtype, int vector, int pairs) {
    Ints bits;
    if (pairs) {
        memcpy(&bits, group + vector / 2 * sizeof bits, sizeof bits);
        return vector & 1 ? bits & (int32_t)0xFFFF0000 : bits << 16;
    }
    if (dtype == FLOAT32) {
        memcpy(&bits, group + vector * sizeof bits, sizeof bits);
        return bits;
    }
    Shorts halves;
    memcpy(&halves, group + vector * sizeof halves, sizeof halves);
    return __builtin_convertvector(halves, Ints) << 16;
}

INLINE Doubles load(const char *group, int dtype, int vector, int pairs) {
    if (dtype == FLOAT64) return (Doubles)load_longs(group, vector);
    return WIDEN((Floats)load_ints(group, dtype, vector, pairs));
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
INLINE double fold(const Doubles *lanes, int pairs) {
    double sums[LANES];
    for (int vector = 0; vector < VECTORS; vector++)
        for (int place = 0; place < WIDTH; place++) sums[lane_of(vector, place, pairs)] = lanes[vector][place];
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}

typedef struct {
    Doubles mine[VECTORS], product[VECTORS], other[VECTORS], difference[VECTORS];
} Lanes;

/* Of one part. largest: |a - b|, but NaN. The others have a field for each width of elements. num: with
 * other bits; any width can count those of a part. farthest: the numbers between a and b, less by the smallest of their
 * type, so that they are compared with a sign.
 */
typedef struct {
    Doubles largest;
    Longs num, farthest;
    Ints num_ints, farthest_ints;
    WideShorts num_shorts, farthest_shorts;
} Extremes;

/* Bits in the order of the numbers, where both zeros are 0, are the magnitude, with the sign. */
#define DEFINE_ADD_BITS(NAME, VECTOR, SIGN, MAX, SMALLEST, LARGEST)       \
    INLINE void NAME(VECTOR *num, VECTOR *farthest, VECTOR a, VECTOR b) { \
        VECTOR sign_a = a >> SIGN, sign_b = b >> SIGN;                    \
        *num -= a != b;                                                   \
        a = (a ^ (sign_a & MAX)) - sign_a;                                \
        b = (b ^ (sign_b & MAX)) - sign_b;                                \
        VECTOR distance = (LARGEST(a, b) - SMALLEST(a, b)) ^ (-MAX - 1);  \
        *farthest = LARGEST(distance, *farthest);                         \
    }

DEFINE_ADD_BITS(add_longs, Longs, 63, INT64_MAX, CHOOSE_SMALLER, CHOOSE_LARGER)
DEFINE_ADD_BITS(add_ints, Ints, 31, INT32_MAX, SMALLER_INTS, LARGER_INTS)
DEFINE_ADD_BITS(add_shorts, WideShorts, 15, INT16_MAX, SMALLER_SHORTS, LARGER_SHORTS)

INLINE Doubles fuse_exact(Doubles left, Doubles right, Doubles sum, int dtype) {
    return dtype == FLOAT64 ? left * right + sum : FUSE(left, right, sum);
}

INLINE void add_pair(Lanes *lanes, Extremes *seen, const char *left, const char *right, int dtype, int vector,
                     int pairs) {
    Doubles mine = load(left, dtype, vector, pairs), other = load(right, dtype, vector, pairs);
    if (dtype == FLOAT64) add_longs(&seen->num, &seen->farthest, (Longs)mine, (Longs)other);
    if (dtype == FLOAT32) {
        Ints a = load_ints(left, dtype, vector, 0), b = load_ints(right, dtype, vector, 0);
        add_ints(&seen->num_ints, &seen->farthest_ints, a, b);
    }
    Doubles difference = mine - other;
    seen->largest = LARGER((Doubles)((Longs)difference & INT64_MAX), seen->largest);
    lanes->mine[vector] = fuse_exact(mine, mine, lanes->mine[vector], dtype);
    lanes->product[vector] = fuse_exact(mine, other, lanes->product[vector], dtype);
    lanes->other[vector] = fuse_exact(other, other, lanes->other[vector], dtype);
    lanes->difference[vector] += difference * difference;
}

/* Adds a group of elements. */
INLINE void add_group(Lanes *lanes, Extremes *seen, const char *left, const char *right, int dtype, int pairs) {
    for (int vector = 0; vector < VECTORS; vector++) add_pair(lanes, seen, left, right, dtype, vector, pairs);
    if (dtype == BFLOAT16)
        for (size_t start = 0; start < 2 * LANES; start += sizeof(WideShorts)) {
            WideShorts a, b;
            memcpy(&a, left + start, sizeof a);
            memcpy(&b, right + start, sizeof b);
            add_shorts(&seen->num_shorts, &seen->farthest_shorts, a, b);
        }
}

/* Adds a group that is equal on both sides. is_first: so is all before it, so that the three sums are one. */
INLINE void add_equal(Lanes *lanes, const char *group, int dtype, int pairs, int is_first) {
    for (int vector = 0; vector < VECTORS; vector++) {
        Doubles values = load(group, dtype, vector, pairs);
        lanes->mine[vector] = fuse_exact(values, values, lanes->mine[vector], dtype);
        if (is_first) continue;
        lanes->product[vector] = fuse_exact(values, values, lanes->product[vector], dtype);
        lanes->other[vector] = fuse_exact(values, values, lanes->other[vector], dtype);
    }
}

INLINE void add_equal_part(Lanes *lanes, const char *part, const char *rest, int64_t num, int dtype, int pairs,
                           int is_first) {
    for (int64_t done = 0; done + LANES <= num; done += LANES)
        add_equal(lanes, part + done * size_of(dtype), dtype, pairs, is_first);
    add_equal(lanes, rest, dtype, pairs, is_first);
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
    for (int lane = 0; lane < (dtype == BFLOAT16 ? 2 * WIDTH : WIDTH); lane++) {
        uint64_t distance = dtype == FLOAT64   ? (uint64_t)seen->farthest[lane] - (uint64_t)INT64_MIN
                            : dtype == FLOAT32 ? (uint64_t)((int64_t)seen->farthest_ints[lane] - INT32_MIN)
                                               : (uint64_t)((int64_t)seen->farthest_shorts[lane] - INT16_MIN);
        if (distance > sums->max_ulp) sums->max_ulp = distance;
        sums->num_different += dtype == FLOAT64   ? seen->num[lane]
                               : dtype == FLOAT32 ? seen->num_ints[lane]
                                                  : seen->num_shorts[lane];
    }
    for (int lane = 0; lane < WIDTH; lane++)
        if (((Longs)seen->largest)[lane] > largest) largest = ((Longs)seen->largest)[lane];
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
    int pairs = dtype == BFLOAT16 && CAN_PAIR, is_equal = 1;
    Lanes lanes = {0};
    for (int64_t start = 0, stop, chunk_stop = 0; start < length; start = stop) {
        if (start == chunk_stop) chunk_stop = length - start < chunk ? length : start + chunk;
        stop = chunk_stop - start < PART ? chunk_stop : start + PART;
        const char *a = left + start * size, *b = right + start * size;
        int64_t done = 0, num = stop - start, rest = num % LANES;
        char rest_a[8 * LANES] = {0}, rest_b[8 * LANES] = {0}; /* zeros add nothing */
        memcpy(rest_a, a + (num - rest) * size, rest * size);
        memcpy(rest_b, b + (num - rest) * size, rest * size);
        if (memcmp(a, b, num * size)) {
            if (is_equal) {
                memcpy(lanes.product, lanes.mine, sizeof lanes.mine);
                memcpy(lanes.other, lanes.mine, sizeof lanes.mine);
                is_equal = 0;
            }
            Extremes seen = {.farthest = (Longs){0} + INT64_MIN,
                             .farthest_ints = (Ints){0} + INT32_MIN,
                             .farthest_shorts = (WideShorts){0} + INT16_MIN};
            for (; done + LANES <= num; done += LANES)
                add_group(&lanes, &seen, a + done * size, b + done * size, dtype, pairs);
            add_group(&lanes, &seen, rest_a, rest_b, dtype, pairs);
            if (!add_extremes(sums, &seen, a, b, start, num, dtype)) return 0;
        } else if (is_equal) {
            add_equal_part(&lanes, a, rest_a, num, dtype, pairs, 1);
        } else {
            add_equal_part(&lanes, a, rest_a, num, dtype, pairs, 0);
        }
        if (stop == chunk_stop) {
            sums->squares[0] += fold(lanes.mine, pairs);
            sums->squares[1] += fold(is_equal ? lanes.mine : lanes.product, pairs);
            sums->squares[2] += fold(is_equal ? lanes.mine : lanes.other, pairs);
            sums->squares[3] += fold(lanes.difference, pairs);
            lanes = (Lanes){0};
            is_equal = 1;
        }
    }
    for (int each = 0; each < 4; each++)
        if (!__builtin_isfinite(sums->squares[each])) return 0;
    return 1;
}

typedef struct {
    Doubles difference[VECTORS], size[VECTORS], rounding[VECTORS];
} ChangeLanes;

/* old, new and gradient: of the baseline, then of the candidate. */
typedef struct {
    const char *old[2], *new[2], *gradient[2];
} Sides;

/* Returns where an element has a say: all bits of it. */
INLINE Longs find_counted(const Sides *sides, int64_t offset, int dtype, int vector, int pairs, double significant) {
    const char *left = sides->gradient[0] + offset, *right = sides->gradient[1] + offset;
    if (dtype == FLOAT64) {
        Doubles mine = (Doubles)load_longs(left, vector), distance = mine - (Doubles)load_longs(right, vector);
        return (Doubles)((Longs)distance & INT64_MAX) <= (Doubles)((Longs)mine & INT64_MAX) * significant;
    }
    Floats mine = (Floats)load_ints(left, dtype, vector, pairs);
    Floats distance = mine - (Floats)load_ints(right, dtype, vector, pairs);
    Ints is_counted = (Floats)((Ints)distance & INT32_MAX) <= (Floats)((Ints)mine & INT32_MAX) * (float)significant;
    return EXTEND(is_counted);
}

INLINE void add_change(ChangeLanes *lanes, Longs *num_excluded, const Sides *sides, int64_t index, int dtype,
                       int gradient_dtype, int vector, int pairs, int is_same_old, double significant) {
    int64_t offset = index * size_of(dtype);
    Doubles new = load(sides->new[0] + offset, dtype, vector, pairs);
    Doubles old = load(sides->old[0] + offset, dtype, vector, pairs), mine = new - old;
    Doubles other = load(sides->new[1] + offset, dtype, vector, pairs) -
                    (is_same_old ? old : load(sides->old[1] + offset, dtype, vector, pairs));
    Doubles difference = other - mine, space;
    /* The power of two below a number: it without sign and mantissa. */
    if (dtype == FLOAT64) space = (Doubles)((Longs)new & INFINITE);
    else space = WIDEN((Floats)(load_ints(sides->new[0] + offset, dtype, vector, pairs) & 0x7F800000));
    if (gradient_dtype != NONE) {
        Longs is_counted =
            find_counted(sides, index * size_of(gradient_dtype), gradient_dtype, vector, pairs, significant);
        *num_excluded += is_counted + 1;
        mine = (Doubles)((Longs)mine & is_counted);
        difference = (Doubles)((Longs)difference & is_counted);
        space = (Doubles)((Longs)space & is_counted);
    }
    lanes->difference[vector] += difference * difference;
    lanes->size[vector] += mine * mine;
    lanes->rounding[vector] = fuse_exact(space, space, lanes->rounding[vector], dtype);
}

INLINE void add_changes(ChangeLanes *lanes, Longs *num_excluded, const Sides *sides, int64_t index, int dtype,
                        int gradient_dtype, int pairs, int is_same_old, double significant) {
    for (int vector = 0; vector < VECTORS; vector++)
        add_change(lanes, num_excluded, sides, index, dtype, gradient_dtype, vector, pairs, is_same_old, significant);
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
                              int gradient_dtype, int is_same_old, double significant, double unit) {
    Longs num_excluded = {0};
    int pairs = dtype == BFLOAT16 && (gradient_dtype == NONE || gradient_dtype == BFLOAT16) && CAN_PAIR;
    char rest[6 * 8 * LANES];
    for (int64_t start = 0, stop; start < length; start = stop) {
        ChangeLanes lanes = {0};
        stop = length - start < chunk ? length : start + chunk;
        int64_t whole = stop - (stop - start) % LANES;
        for (int64_t index = start; index < whole; index += LANES)
            add_changes(&lanes, &num_excluded, sides, index, dtype, gradient_dtype, pairs, is_same_old, significant);
        if (whole < stop) {
            Sides copy = copy_rest(sides, rest, whole, stop - whole, dtype, gradient_dtype);
            add_changes(&lanes, &num_excluded, &copy, 0, dtype, gradient_dtype, pairs, is_same_old, significant);
        }
        sums[0] += fold(lanes.difference, pairs);
        sums[1] += fold(lanes.size, pairs);
        sums[2] += fold(lanes.rounding, pairs) * unit;
    }
    int64_t num = 0;
    for (int lane = 0; lane < WIDTH; lane++) num += num_excluded[lane];
    return num;
}

/* As native.c says. */
int OF_KIND(sum_pair)(const void *left, const void *right, int64_t length, int64_t chunk, int dtype, double *squares,
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

/* As native.c says. */
int64_t OF_KIND(sum_changes)(const char *const *sides, int64_t length, int64_t chunk, int dtype, int gradient_dtype,
                    double significant, double unit, double *sums) {
    Sides both = {{sides[0], sides[3]}, {sides[1], sides[4]}, {sides[2], sides[5]}};
#define SUM_BY_OLD(TYPE, GRADIENT, IS_SAME) \
    sum_changes_of(sums, &both, length, chunk, TYPE, GRADIENT, IS_SAME, significant, unit)
#define SUM(TYPE, GRADIENT) \
    return sides[0] == sides[3] ? SUM_BY_OLD(TYPE, GRADIENT, 1) : SUM_BY_OLD(TYPE, GRADIENT, 0)
#define SUM_BY_GRADIENT(TYPE)                                \
    do {                                                     \
        if (gradient_dtype == NONE) SUM(TYPE, NONE);         \
        if (gradient_dtype == FLOAT32) SUM(TYPE, FLOAT32);   \
        if (gradient_dtype == BFLOAT16) SUM(TYPE, BFLOAT16); \
        SUM(TYPE, FLOAT64);                                  \
    } while (0)
    if (dtype == FLOAT32) SUM_BY_GRADIENT(FLOAT32);
    if (dtype == BFLOAT16) SUM_BY_GRADIENT(BFLOAT16);
    SUM_BY_GRADIENT(FLOAT64);
}
