/* The passes for processors with AVX-512. */
#include "native.h"

#ifdef HAS_X86
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#include <immintrin.h>

#define WIDTH 8
#define SUM_PAIR sum_pair_avx512
#define SUM_CHANGES sum_changes_avx512
#define WIDEN(FLOATS) (Doubles) _mm512_cvtps_pd(FLOATS)
#define EXTEND(INTS) (Longs) _mm512_cvtepi32_epi64((__m256i)(INTS))
#define FUSE(LEFT, RIGHT, SUM) (Doubles) _mm512_fmadd_pd(LEFT, RIGHT, SUM)
#define LARGER(V, W) (Doubles) _mm512_max_pd(V, W)
#define LARGER_INTS(V, W) (Ints) _mm256_max_epi32((__m256i)(V), (__m256i)(W))
#define SMALLER_INTS(V, W) (Ints) _mm256_min_epi32((__m256i)(V), (__m256i)(W))
#define LARGER_SHORTS(V, W) (WideShorts) _mm256_max_epi16((__m256i)(V), (__m256i)(W))
#define SMALLER_SHORTS(V, W) (WideShorts) _mm256_min_epi16((__m256i)(V), (__m256i)(W))
#include "passes.h"
#endif
