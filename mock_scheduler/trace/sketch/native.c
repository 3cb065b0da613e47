/* Sums elements into the parts of a sketch; constants.py and sketch.py say what is summed. host.py calls it, and has the
 * same in torch for where this is not built. Elements are read once, where they lie. The passes (passes.h) are built for
 * several processors, of which the best one is taken.
 */
#include "passes.h"

#ifdef HAS_X86
#define DECLARE(KIND)                                                                                             \
    void sketch_rows_##KIND(const char *, int64_t, int64_t, int64_t, uint64_t, uint64_t, int, int, const int64_t *, \
                            double *, double *, int64_t *);
DECLARE(avx2)
DECLARE(avx512)
#endif

/* Its name ends in a version: raise it, here and in host.py, with any change of arguments or of sums.
 *
 * Adds rows of elements, of which row r begins at the canonical index start + r * stride.
 *
 * constants: [BLOCK + LANES]: keys, less 1 where the sign is +1. slots: added to. squares: [1], counts: [3]: the
 * fingerprint, NaN, infinities; written. is_masked: NaN and infinities are counted, and add 0; else they are not looked
 * for, and make the squares so too.
 */
void sketch_rows_2(const char *elements, int64_t num_rows, int64_t row_bytes, int64_t length, uint64_t start,
                   uint64_t stride, int dtype, int is_masked, const int64_t *constants, double *slots, double *squares,
                   int64_t *counts) {
    BEST(sketch_rows)
    (elements, num_rows, row_bytes, length, start, stride, dtype, is_masked, constants, slots, squares, counts);
}
