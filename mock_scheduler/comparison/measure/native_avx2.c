/* The passes for processors with AVX2. */
#define FOR_AVX2
#include "native.h"

#ifdef HAS_X86
#include "passes.h"
#endif
