/* The passes for processors with AVX-512. */
#define FOR_AVX512
#include "native.h"

#ifdef HAS_X86
#include "passes.h"
#endif
