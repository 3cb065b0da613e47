/* What the C files share: the numbers of the dtypes (native.py has the same), and how their functions are built. */
#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { NONE = -1, FLOAT32 = 0, BFLOAT16 = 1, FLOAT64 = 2 };

INLINE int64_t size_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86
#endif

/* Builds a function for several processors, of which the loader takes the best one that there is. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define FOR_EACH_PROCESSOR
#endif
