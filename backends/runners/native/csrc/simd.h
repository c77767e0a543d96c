// Sixteen lanes of floats, the two element types of the kernels, and the mode of arithmetic: the one place that knows
// the instruction set. What else is written in these names runs on any; see variants.c for how one is added.
//
// Every reduction in these kernels has an order that depends on the reduced dimension only, never on how many rows,
// columns or threads take part, nor on how long the CPU's registers are. That is what makes a row's result bitwise the
// same in any batch, and the same in every variant of the kernels.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__) && !defined(MG_GENERIC)
#if !defined(__clang__)
// gcc loads so far ahead in a tile that its sums no longer fit the registers.
#pragma GCC optimize("no-schedule-insns")
#endif
#include <arm_neon.h>
#define NEON 1
#else
#define NEON 0
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
typedef uint16_t bf16;

// Floats of a register. HAS_DOT: a dot product of bfloat16 pairs, which adds the second product, then the first. (Arm's
// BFDOT adds the two products to one another before the sum, so it has other bits.)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PART_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define PART_LANES 8
#else
#define PART_LANES 4
#endif
#if defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

enum { PARTS = LANES / PART_LANES };
typedef float part __attribute__((vector_size(PART_LANES * 4)));
typedef int32_t part_i __attribute__((vector_size(PART_LANES * 4)));
typedef struct {
    part p[PARTS];
} vf;
typedef struct {
    part_i p[PARTS];
} vi;

#define EACH_PART(i) _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

INLINE part part_set(float x) {
#if PART_LANES == 16
    return (part)_mm512_set1_ps(x);
#elif PART_LANES == 8
    return (part)_mm256_set1_ps(x);
#else
    return (part){x, x, x, x};
#endif
}
INLINE part_i part_i_set(int32_t x) { return (part_i){0} + x; }
INLINE part part_select(part_i mask, part a, part b) { return (part)((mask & (part_i)a) | (~mask & (part_i)b)); }

// a * b + c, rounded once; the build flags forbid any other contraction.
INLINE part part_fma(part a, part b, part c) {
#if PART_LANES == 16
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PART_LANES == 8
    return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif NEON
    return (part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    part r;
    for (int i = 0; i < PART_LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

// b where they are equal, or one is no number.
INLINE part part_max(part a, part b) {
#if PART_LANES == 16
    return (part)_mm512_max_ps((__m512)a, (__m512)b);
#elif PART_LANES == 8
    return (part)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return part_select(a > b, a, b);
#endif
}

// The same address, unknown to the compiler: it would keep what it has loaded from there, and registers are few.
INLINE const char *hidden(const char *address) {
    __asm__("" : "+r"(address));
    return address;
}

INLINE int part_i_any(part_i v) {
#if PART_LANES == 16
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif PART_LANES == 8
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#elif NEON
    return vmaxvq_u32((uint32x4_t)v) != 0;
#else
    int any = 0;
    for (int i = 0; i < PART_LANES; i++) any |= v[i];
    return any != 0;
#endif
}

// Arithmetic takes denormal numbers for zero, as dot products of bfloat16 do whatever the mode is: so all variants
// agree about them. Gives what the mode was.
#if defined(__x86_64__)
typedef unsigned float_mode;
INLINE float_mode float_mode_begin(void) {
    const float_mode before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
    return before;
}
INLINE void float_mode_end(float_mode before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
INLINE float_mode float_mode_begin(void) {
    float_mode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
    return before;
}
INLINE void float_mode_end(float_mode before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
typedef int float_mode;
INLINE float_mode float_mode_begin(void) { return 0; }
INLINE void float_mode_end(float_mode before) { (void)before; }
#endif

// clang-format off
#define EACH(result, expression) result r_; EACH_PART(i) r_.p[i] = (expression); return r_
INLINE vf vf_set(float x) { EACH(vf, part_set(x)); }
INLINE vf vf_add(vf a, vf b) { EACH(vf, a.p[i] + b.p[i]); }
INLINE vf vf_sub(vf a, vf b) { EACH(vf, a.p[i] - b.p[i]); }
INLINE vf vf_mul(vf a, vf b) { EACH(vf, a.p[i] * b.p[i]); }
INLINE vf vf_div(vf a, vf b) { EACH(vf, a.p[i] / b.p[i]); }
INLINE vf vf_neg(vf a) { EACH(vf, -a.p[i]); }
INLINE vf vf_fma(vf a, vf b, vf c) { EACH(vf, part_fma(a.p[i], b.p[i], c.p[i])); }
INLINE vf vf_fma_spread(vf a, part b, vf c) { EACH(vf, part_fma(a.p[i], b, c.p[i])); }
INLINE vf vf_max(vf a, vf b) { EACH(vf, part_max(a.p[i], b.p[i])); }
INLINE vi vi_set(int32_t x) { EACH(vi, part_i_set(x)); }
INLINE vi vi_and(vi a, vi b) { EACH(vi, a.p[i] & b.p[i]); }
INLINE vi vi_or(vi a, vi b) { EACH(vi, a.p[i] | b.p[i]); }
INLINE vi vi_sub(vi a, vi b) { EACH(vi, a.p[i] - b.p[i]); }
INLINE vi vf_bits(vf a) { EACH(vi, (part_i)a.p[i]); }
INLINE vi vf_is_nan(vf a) { EACH(vi, a.p[i] != a.p[i]); }
INLINE vf vi_to_float(vi a) { EACH(vf, __builtin_convertvector(a.p[i], part)); }
// clang-format on

INLINE vf vf_load(const float *p) {
    vf v;
    EACH_PART(i) memcpy(&v.p[i], p + i * PART_LANES, sizeof(part));
    return v;
}
INLINE void vf_store(float *p, vf v) { EACH_PART(i) memcpy(p + i * PART_LANES, &v.p[i], sizeof(part)); }
INLINE vi vi_load(const void *p) {
    vi v;
    EACH_PART(i) memcpy(&v.p[i], (const char *)p + i * sizeof(part_i), sizeof(part_i));
    return v;
}
INLINE void vi_store(void *p, vi v) { EACH_PART(i) memcpy((char *)p + i * sizeof(part_i), &v.p[i], sizeof(part_i)); }

// -1 in the first n lanes, 0 in the others.
INLINE vi vi_first(int n) {
    static const int32_t border[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    return vi_load(border + LANES - (n < 0 ? 0 : n > LANES ? LANES : n));
}

INLINE float vf_sum(vf v) {  // pairwise, in a fixed order
    float s[LANES];
    vf_store(s, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

INLINE float vf_hmax(vf v) {
    float s[LANES];
    vf_store(s, v);
    float m = s[0];
    for (int i = 1; i < LANES; i++) m = s[i] > m ? s[i] : m;
    return m;
}

INLINE int vi_any(vi v) {
    part_i any = v.p[0];
    for (int i = 1; i < PARTS; i++) any |= v.p[i];
    return part_i_any(any);
}

INLINE int vf_any_above(vf v, float x) {
    vi above;
    EACH_PART(i) above.p[i] = v.p[i] > part_set(x);
    return vi_any(above);
}

// exp(x), polynomial of degree 6 after range reduction by ln 2 (Cody and Waite); 0 below -87, exp(88) above 88.
INLINE part part_exp(part x) {
    const part low = part_set(-87.0f);
    const part_i dead = x < low;
    x = part_max(x, low);
    x = part_select(x > part_set(88.0f), part_set(88.0f), x);
    const part magic = part_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const part shifted = part_fma(x, part_set(1.44269504f), magic);
    const part n = shifted - magic;
    part r = part_fma(n, part_set(-0.693359375f), x);
    r = part_fma(n, part_set(2.12194440e-4f), r);
    part p = part_set(1.9875691500e-4f);
    p = part_fma(p, r, part_set(1.3981999507e-3f));
    p = part_fma(p, r, part_set(8.3334519073e-3f));
    p = part_fma(p, r, part_set(4.1665795894e-2f));
    p = part_fma(p, r, part_set(1.6666665459e-1f));
    p = part_fma(p, r, part_set(5.0000001201e-1f));
    p = part_fma(p * r, r, r) + part_set(1.0f);
    const part_i bits = ((part_i)shifted - (part_i)magic) << 23;
    return (part)(((part_i)p + bits) & ~dead);
}

INLINE vf vf_exp(vf x) {
    vf v;
    EACH_PART(i) v.p[i] = part_exp(x.p[i]);
    return v;
}

INLINE vf vf_silu(vf x) { return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_neg(x)))); }

INLINE float bf16_to_f32(bf16 h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Rounding to bfloat16 is to the nearest, ties to even; a NaN stays a NaN, a denormal number becomes zero.
INLINE bf16 f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
    if (!(u & 0x7f800000u)) return (bf16)(u >> 16 & 0x8000);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// The same, as floats whose lower half is zero.
INLINE vf vf_round_bf16(vf v) {
    EACH_PART(i) {
        const part_i u = (part_i)v.p[i], top = part_i_set(0x7f800000), sign = part_i_set(INT32_MIN);
        const part_i size = u & ~sign, nan = size > top, whole = (u & top) != 0;
        part_i r = u + part_i_set(0x7fff) + ((u >> 16) & part_i_set(1));
        r = (nan & (u | part_i_set(0x400000))) | (~nan & r);
        r = (whole & r) | (~whole & u & sign);
        v.p[i] = (part)(r & part_i_set((int32_t)0xffff0000));
    }
    return v;
}

INLINE void bf16_store16(bf16 *p, vf v) {
#if HAS_DOT && PART_LANES == 16
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v.p[0]);
    memcpy(p, &h, 32);
#else
    const vf rounded = vf_round_bf16(v);
#if PART_LANES == 16
    const __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded.p[0], 16));
    memcpy(p, &h, 32);
#elif PART_LANES == 8
    const __m256i a = _mm256_srli_epi32((__m256i)rounded.p[0], 16), b = _mm256_srli_epi32((__m256i)rounded.p[1], 16);
    const __m256i h = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    memcpy(p, &h, 32);
#elif NEON
    EACH_PART(i) vst1_u16(p + i * 4, vshrn_n_u32((uint32x4_t)rounded.p[i], 16));
#else
    uint32_t u[LANES];
    memcpy(u, &rounded, sizeof u);
    for (int i = 0; i < LANES; i++) p[i] = (bf16)(u[i] >> 16);
#endif
#endif
}

INLINE vf bf16_load16(const bf16 *p) {
    vf v;
#if PART_LANES == 16
    __m256i h;
    memcpy(&h, p, 32);
    v.p[0] = (part)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#elif PART_LANES == 8
    EACH_PART(i) {
        __m128i h;
        memcpy(&h, p + i * 8, 16);
        v.p[i] = (part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
    }
#elif NEON
    EACH_PART(i) v.p[i] = (part)vshll_n_u16(vld1_u16(p + i * 4), 16);
#else
    float f[LANES];
    for (int i = 0; i < LANES; i++) f[i] = bf16_to_f32(p[i]);
    memcpy(&v, f, sizeof v);
#endif
    return v;
}

// Neighbours change places.
INLINE vf vf_swap_pairs(vf v) {
    EACH_PART(i) {
#if PART_LANES == 16
        v.p[i] = (part)_mm512_permute_ps((__m512)v.p[i], 0xb1);
#elif PART_LANES == 8
        v.p[i] = (part)_mm256_permute_ps((__m256)v.p[i], 0xb1);
#elif NEON
        v.p[i] = (part)vrev64q_u32((uint32x4_t)v.p[i]);
#else
        v.p[i] = (part){v.p[i][1], v.p[i][0], v.p[i][3], v.p[i][2]};
#endif
    }
    return v;
}

// 64 bytes of pairs of bfloat16 numbers as two vectors of floats: the second of each pair, the first.
INLINE vf bf16_second(const void *pairs) {
    const vi both = vi_load(pairs), upper = vi_set((int32_t)0xffff0000);
    vf v;
    EACH_PART(i) v.p[i] = (part)(both.p[i] & upper.p[i]);
    return v;
}
INLINE vf bf16_first(const void *pairs) {
    const vi both = vi_load(pairs);
    vf v;
    EACH_PART(i) v.p[i] = (part)(both.p[i] << 16);
    return v;
}

#if HAS_DOT
// acc + the products of a line's pairs with the pair at x.
INLINE vf bf16_dot(vf acc, const vi line, int32_t x) {
    acc.p[0] = (part)_mm512_dpbf16_ps((__m512)acc.p[0], (__m512bh)line.p[0], (__m512bh)_mm512_set1_epi32(x));
    return acc;
}
#endif

// Weights in eight bits (weights8.h): sixteen signed bytes as floats.
INLINE vf int8_floats(const int8_t *p) {
    vf v;
#if PART_LANES == 16
    v.p[0] = (part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif PART_LANES == 8
    EACH_PART(i) {
        int64_t eight;
        memcpy(&eight, p + i * 8, 8);
        v.p[i] = (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(eight)));
    }
#else
    float f[LANES];
    for (int i = 0; i < LANES; i++) f[i] = p[i];
    memcpy(&v, f, sizeof v);
#endif
    return v;
}

#if HAS_DOT
// A line of pairs, of floats that are bfloat16 numbers already.
INLINE vi bf16_pairs(vf first, vf second) {
    EACH(vi, (part_i)second.p[i] | (((part_i)first.p[i] >> 16) & part_i_set(0xffff)));
}
#endif

// Dot products of eight-bit numbers, unsigned times signed, exact in any order: sums of a unit's 16 columns, along
// lines of four elements of each. `x`: the four elements that a line is multiplied by.
#if defined(__AVX512VNNI__)
typedef vi int8_sums;
typedef int32_t int8_four;
INLINE int8_sums int8_none(void) { return vi_set(0); }
INLINE int8_four int8_spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}
INLINE int8_sums int8_step(int8_sums sums, const uint8_t *line, int8_four x) {
    sums.p[0] = (part_i)_mm512_dpbusd_epi32((__m512i)sums.p[0], (__m512i)vi_load(line).p[0], _mm512_set1_epi32(x));
    return sums;
}
INLINE vi int8_columns(int8_sums sums) { return sums; }
#elif defined(__AVX2__)
// Two sums for each column, four columns to a register.
typedef struct {
    __m256i p[4];
} int8_sums;
typedef __m256i int8_four;
INLINE int8_sums int8_none(void) {
    return (int8_sums){{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()}};
}
INLINE int8_four int8_spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
}
INLINE int8_sums int8_step(int8_sums sums, const uint8_t *line, int8_four x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(line + i * 16)));
        sums.p[i] = _mm256_add_epi32(sums.p[i], _mm256_madd_epi16(wide, x));
    }
    return sums;
}
INLINE vi int8_columns(int8_sums sums) {
    __m256i half[2];
    for (int i = 0; i < 2; i++)  // adds neighbours, of each half of a register; columns 0 1 4 5 2 3 6 7 come out
        half[i] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.p[2 * i], sums.p[2 * i + 1]), 0xd8);
    vi v;
    memcpy(&v, half, sizeof v);
    return v;
}
#elif NEON
// Signed times signed is what all these CPUs have, so 128 is taken from the weights, and comes back with the sum of x.
typedef struct {
    int32x4_t p[4], x;
} int8_sums;
typedef struct {
    int8x16_t x;
    int32x4_t sum;
} int8_four;
INLINE int8_sums int8_none(void) {
    const int32x4_t none = vdupq_n_s32(0);
    return (int8_sums){{none, none, none, none}, none};
}
INLINE int8_four int8_spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    const int8x16_t spread = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return (int8_four){spread, vpaddlq_s16(vpaddlq_s8(spread))};
}
INLINE int8_sums int8_step(int8_sums sums, const uint8_t *line, int8_four four) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int8x16_t w = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line + i * 16), vdupq_n_u8(0x80)));
#if defined(__ARM_FEATURE_DOTPROD)
        sums.p[i] = vdotq_s32(sums.p[i], w, four.x);
#else
        // Two products are at most 2 * 128 * 127, which fits 16 bits.
        const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four.x)), high = vmull_high_s8(w, four.x);
        sums.p[i] = vpadalq_s16(sums.p[i], vpaddq_s16(low, high));
#endif
    }
    sums.x = vaddq_s32(sums.x, four.sum);
    return sums;
}
INLINE vi int8_columns(int8_sums sums) {
    vi v;
    EACH_PART(i) v.p[i] = (part_i)vaddq_s32(sums.p[i], vshlq_n_s32(sums.x, 7));
    return v;
}
#else
typedef vi int8_sums;
typedef const int8_t *int8_four;
INLINE int8_sums int8_none(void) { return vi_set(0); }
INLINE int8_four int8_spread(const int8_t *x) { return x; }
INLINE int8_sums int8_step(int8_sums sums, const uint8_t *line, int8_four x) {
    int32_t s[LANES];
    memcpy(s, &sums, sizeof s);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) s[i] += line[i * 4 + j] * x[j];
    memcpy(&sums, s, sizeof s);
    return sums;
}
INLINE vi int8_columns(int8_sums sums) { return sums; }
#endif

// Sixteen numbers that fit eight bits.
INLINE void int8_store16(int8_t *p, vi v) {
#if NEON
    const int16x8_t low = vmovn_high_s32(vmovn_s32((int32x4_t)v.p[0]), (int32x4_t)v.p[1]);
    const int16x8_t high = vmovn_high_s32(vmovn_s32((int32x4_t)v.p[2]), (int32x4_t)v.p[3]);
    vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
#else
    int32_t s[LANES];
    vi_store(s, v);
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)s[i];
#endif
}

// Tiles of the micro-kernel: their sums, a column or two of weights and one operand must fit the registers. TILE_ROWS:
// of one unit (16 columns); DOUBLE_ROWS: of two; QUAD_ROWS: of four. BLOCKED_ROWS: more are worth blocks along K.
#if PART_LANES == 16
enum { TILE_ROWS = 12, DOUBLE_ROWS = 12, QUAD_ROWS = 6, BLOCKED_ROWS = 6 };
_Static_assert(4 * QUAD_ROWS + 5 <= 32 && 2 * DOUBLE_ROWS + 3 <= 32, "a tile must fit 32 registers");
#elif PART_LANES == 8
enum { TILE_ROWS = 6, DOUBLE_ROWS = 1, QUAD_ROWS = 1, BLOCKED_ROWS = 12 };
_Static_assert(2 * TILE_ROWS + 3 <= 16 && 8 * QUAD_ROWS + 3 <= 16, "a tile must fit 16 registers");
#else
enum { TILE_ROWS = 6, DOUBLE_ROWS = 2, QUAD_ROWS = 1, BLOCKED_ROWS = 12 };
_Static_assert(4 * TILE_ROWS + 5 <= 32 && 8 * DOUBLE_ROWS + 9 <= 32, "a tile must fit 32 registers");
_Static_assert(16 * QUAD_ROWS + 5 <= 32, "a tile must fit 32 registers");
#endif
