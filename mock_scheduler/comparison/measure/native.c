/* Sums a pair of tensors, and an update of both, in one pass each; figures.py and changes.py say what is summed, and
 * have the same in NumPy. The passes (passes.h) are built for several processors, of which the best one is taken.
 */
#include "passes.h"

#ifdef HAS_X86
#define DECLARE(KIND)                                                                                              \
    int sum_pair_##KIND(const void *, const void *, int64_t, int64_t, int, double *, double *, int64_t *);         \
    int64_t sum_changes_##KIND(const char *const *, int64_t, int64_t, int, int, double, double, double *);
DECLARE(avx2)
DECLARE(avx512)
#endif

/* Sums the pairs of elements of two sides; returns 0, and writes nothing, where an element or a sum is not finite.
 *
 * chunk: elements that are summed by themselves. squares: [4], added to: <a,a>, <a,b>, <b,b>, ||a-b||². max_abs: [1].
 * counts: [4]: elements with other bits, the first of them, the first with the largest |a-b|, -1 where there is none,
 * and the largest number of numbers between a and b, unsigned.
 */
int sum_pair_1(const void *left, const void *right, int64_t length, int64_t chunk, int dtype, double *squares,
               double *max_abs, int64_t *counts) {
    return BEST(sum_pair)(left, right, length, chunk, dtype, squares, max_abs, counts);
}

/* Sums the changes from old to new; returns the number of elements left out. All are finite.
 *
 * sides: [6]: old, new and gradient of the baseline, then of the candidate. gradient_dtype: -1 where there are none.
 * unit: the square of the spacing of the numbers at 1. sums: [3], added to: ||d_a-d_b||², ||d_a||², of the spacings.
 */
int64_t sum_changes_1(const char *const *sides, int64_t length, int64_t chunk, int dtype, int gradient_dtype,
                      double significant, double unit, double *sums) {
    return BEST(sum_changes)(sides, length, chunk, dtype, gradient_dtype, significant, unit, sums);
}
