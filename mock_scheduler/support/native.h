/* What the C files share: the numbers of the dtypes (native.py has the same), vectors, and instructions.
 *
 * Passes over elements lie in a header, which is built for three kinds of processor: native_avx512.c and native_avx2.c
 * define FOR_AVX512 and FOR_AVX2 before they include this file, native.c does not, and calls the BEST of the three.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { NONE = -1, FLOAT32 = 0, BFLOAT16 = 1, FLOAT64 = 2 };

INLINE int64_t size_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86
#define HAS(FEATURE) __builtin_cpu_supports(FEATURE)
#define HAS_AVX2 (HAS("avx2") && HAS("fma"))
#define HAS_AVX512 (HAS_AVX2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl"))
#define BEST(NAME) (HAS_AVX512 ? NAME##_avx512 : HAS_AVX2 ? NAME##_avx2 : NAME##_any)
#else
#define BEST(NAME) NAME##_any
#endif

/* WIDTH: how many float64 make a vector. KIND: what the names of the passes end in. */
#if defined(HAS_X86) && defined(FOR_AVX512)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#include <immintrin.h>
#define WIDTH 8
#define OF_KIND(NAME) NAME##_avx512
#define WIDEN(FLOATS) (Doubles) _mm512_cvtps_pd((__m256)(FLOATS))
#define EXTEND(INTS) (Longs) _mm512_cvtepi32_epi64((__m256i)(INTS))
#define EXTEND_SHORTS(SHORTS) (Ints) _mm256_cvtepi16_epi32((__m128i)(SHORTS))
#define FUSE(LEFT, RIGHT, SUM) (Doubles) _mm512_fmadd_pd(LEFT, RIGHT, SUM)
#define LARGER(V, W) (Doubles) _mm512_max_pd(V, W)
#define LARGER_INTS(V, W) (Ints) _mm256_max_epi32((__m256i)(V), (__m256i)(W))
#define SMALLER_INTS(V, W) (Ints) _mm256_min_epi32((__m256i)(V), (__m256i)(W))
#define LARGER_SHORTS(V, W) (WideShorts) _mm256_max_epi16((__m256i)(V), (__m256i)(W))
#define SMALLER_SHORTS(V, W) (WideShorts) _mm256_min_epi16((__m256i)(V), (__m256i)(W))
#elif defined(HAS_X86) && defined(FOR_AVX2)
#pragma GCC target("avx2,fma")
#include <immintrin.h>
#define WIDTH 4
#define OF_KIND(NAME) NAME##_avx2
#define WIDEN(FLOATS) (Doubles) _mm256_cvtps_pd((__m128)(FLOATS))
#define EXTEND(INTS) (Longs) _mm256_cvtepi32_epi64((__m128i)(INTS))
#define EXTEND_SHORTS(SHORTS) (Ints) _mm_cvtepi16_epi32(_mm_cvtsi64_si128((int64_t)(SHORTS)))
#define FUSE(LEFT, RIGHT, SUM) (Doubles) _mm256_fmadd_pd(LEFT, RIGHT, SUM)
#define LARGER(V, W) (Doubles) _mm256_max_pd(V, W)
#define LARGER_INTS(V, W) (Ints) _mm_max_epi32((__m128i)(V), (__m128i)(W))
#define SMALLER_INTS(V, W) (Ints) _mm_min_epi32((__m128i)(V), (__m128i)(W))
#define LARGER_SHORTS(V, W) (WideShorts) _mm_max_epi16((__m128i)(V), (__m128i)(W))
#define SMALLER_SHORTS(V, W) (WideShorts) _mm_min_epi16((__m128i)(V), (__m128i)(W))
#else
#ifdef HAS_X86
#pragma GCC optimize("O2") /* for old processors: -O3 takes the compiler four times as long */
#endif
#define WIDTH 4
#define OF_KIND(NAME) NAME##_any
#define WIDEN(FLOATS) __builtin_convertvector(FLOATS, Doubles)
#define EXTEND(INTS) __builtin_convertvector(INTS, Longs)
#define EXTEND_SHORTS(SHORTS) __builtin_convertvector(SHORTS, Ints)
#define FUSE(LEFT, RIGHT, SUM) ((LEFT) * (RIGHT) + (SUM))
/* NaN is never larger. */
#define LARGER(VECTOR, OTHER) (Doubles) CHOOSE((Longs)(VECTOR), (Longs)(OTHER), (VECTOR) > (OTHER))
#define LARGER_INTS CHOOSE_LARGER
#define SMALLER_INTS CHOOSE_SMALLER
#define LARGER_SHORTS CHOOSE_LARGER
#define SMALLER_SHORTS CHOOSE_SMALLER
#endif

/* Choose elements of two vectors of integers. */
#define CHOOSE(VECTOR, OTHER, IS_CHOSEN) (((VECTOR) & (IS_CHOSEN)) | ((OTHER) & ~(IS_CHOSEN)))
#define CHOOSE_LARGER(VECTOR, OTHER) CHOOSE(VECTOR, OTHER, (VECTOR) > (OTHER))
#define CHOOSE_SMALLER(VECTOR, OTHER) CHOOSE(VECTOR, OTHER, (VECTOR) < (OTHER))

typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef int16_t WideShorts __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int64_t Longs __attribute__((vector_size(8 * WIDTH)));
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));
