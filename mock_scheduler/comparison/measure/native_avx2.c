/* The passes for processors with AVX2. */
#include "native.h"

#ifdef HAS_X86
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#define WIDTH 4
#define SUM_PAIR sum_pair_avx2
#define SUM_CHANGES sum_changes_avx2
#define WIDEN(FLOATS) (Doubles) _mm256_cvtps_pd(FLOATS)
#define EXTEND(INTS) (Longs) _mm256_cvtepi32_epi64((__m128i)(INTS))
#define FUSE(LEFT, RIGHT, SUM) (Doubles) _mm256_fmadd_pd(LEFT, RIGHT, SUM)
#define LARGER(V, W) (Doubles) _mm256_max_pd(V, W)
#define LARGER_INTS(V, W) (Ints) _mm_max_epi32((__m128i)(V), (__m128i)(W))
#define SMALLER_INTS(V, W) (Ints) _mm_min_epi32((__m128i)(V), (__m128i)(W))
#define LARGER_SHORTS(V, W) (WideShorts) _mm_max_epi16((__m128i)(V), (__m128i)(W))
#define SMALLER_SHORTS(V, W) (WideShorts) _mm_min_epi16((__m128i)(V), (__m128i)(W))
#include "passes.h"
#endif
