// What is compiled once for any CPU of its architecture: which variants of the kernels this one can run, and what
// needs no variants: the planner of candidates, and the rows of a step.
//
// One library holds all variants of an architecture: kernels.c is compiled once for each, with its own flags and its
// name as MG_VARIANT (names.h), and this file once without any. A new variant of an architecture needs
//   - a line in VARIANTS here, its test of the CPU, and a line in _VARIANTS of bindings.py with its compiler flags;
//   - in simd.h, whatever its instructions do better than the next lower variant: a part (the floats of a register),
//     multiply-add, maximum, conversions, dot products, and the size of the micro-kernel's tiles. Nothing else in these
//     files knows instructions.
// All give the same bits: tests/backends/runners/test_variants.py compares every variant that the CPU can run.

#include "planner.h"
#include "rows.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
// As in the kernel's asm/hwcap.h: LSE atomics, which the compiler uses when it knows of them, and dot products.
static int has_dotprod(void) { return (getauxval(AT_HWCAP) & (1 << 8)) && (getauxval(AT_HWCAP) & (1 << 20)); }
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
static int has_dotprod(void) {
    int has = 0;
    __SIZE_TYPE__ size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, 0, 0) == 0 && has;
}
#elif defined(__aarch64__)
static int has_dotprod(void) { return 0; }
#endif

// clang-format off
#if defined(__x86_64__)
#define HAS(feature) __builtin_cpu_supports(feature)
#define VARIANTS(ENTRY) \
    ENTRY("avx512_bf16", HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512vnni") && HAS("avx512bf16")) \
    ENTRY("avx512", HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("fma")) \
    ENTRY("avx2", HAS("avx2") && HAS("fma"))
#elif defined(__aarch64__)
#define VARIANTS(ENTRY) ENTRY("neon_dotprod", has_dotprod()) ENTRY("neon", 1) ENTRY("generic", 1)
#else
#define VARIANTS(ENTRY) ENTRY("generic", 1)
#endif
// clang-format on

// The name of the n-th variant that this CPU can run, best first; NULL behind the last.
const char *mg_variant(int n) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#define ENTRY(name, runs) \
    if ((runs) && n-- == 0) return name;
    VARIANTS(ENTRY)
#undef ENTRY
    return 0;
}
