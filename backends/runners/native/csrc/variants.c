// Which variants of the kernels this CPU can run. Compiled for any CPU of its architecture.
//
// One library holds all variants of an architecture: kernels.c is compiled once for each, with its own flags and its
// name as MG_VARIANT (names.h), and this file once without any. A new variant of an architecture needs
//   - a line in VARIANTS here, its test of the CPU, and a line in _VARIANTS of bindings.py with its compiler flags;
//   - in simd.h, whatever its instructions do better than the next lower variant: a part (the floats of a register),
//     multiply-add, maximum, conversions, dot products, and the size of the micro-kernel's tiles. Nothing else in these
//     files knows instructions.
// All give the same bits: tests/backends/runners/test_variants.py compares every variant that the CPU can run.

// clang-format off
#if defined(__x86_64__)
#define HAS(feature) __builtin_cpu_supports(feature)
#define VARIANTS(ENTRY) \
    ENTRY("avx512_bf16", HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512vnni") && HAS("avx512bf16")) \
    ENTRY("avx512", HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("fma")) \
    ENTRY("avx2", HAS("avx2") && HAS("fma"))
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
