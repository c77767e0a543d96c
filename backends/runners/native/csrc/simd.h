// Sixteen-lane float vectors and the two element types that the kernels are built for.
//
// Every reduction in these kernels has an order that depends on the reduced dimension only, never on how many rows,
// columns or threads take part. That is what makes a row's result bitwise the same in any batch.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

INLINE vf vf_set(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

// A fused multiply-add wherever the target has one; the build flags forbid any other contraction.
INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    vf r;
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf vf_max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vf_select(a > b, a, b);
#endif
}

INLINE float vf_sum(vf v) {  // pairwise, in a fixed order
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) s[i] += s[i + 4];
    s[0] += s[2];
    s[1] += s[3];
    return s[0] + s[1];
}

INLINE float vf_hmax(vf v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE int vf_any_above(vf v, float x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
#else
    return vf_hmax(v) > x;
#endif
}

INLINE int vi_any(vi v) {
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= v[i];
    return any != 0;
}

// exp(x), polynomial of degree 6 after range reduction by ln 2 (Cody and Waite); 0 below -87, exp(88) above 88.
INLINE vf vf_exp(vf x) {
    const vf low = vf_set(-87.0f);
    vi dead = x < low;
    x = vf_max(x, low);
    x = vf_select(x > vf_set(88.0f), vf_set(88.0f), x);
    const vf magic = vf_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    vf shifted = vf_fma(x, vf_set(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p * r, r, r) + vf_set(1.0f);
    vi bits = ((vi)shifted - (vi)magic) << 23;
    vi result = (vi)p + bits;
    return (vf)(result & ~dead);
}

INLINE vf vf_silu(vf x) { return x / (vf_set(1.0f) + vf_exp(-x)); }

INLINE float bf16_to_f32(bf16 h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE bf16 f32_to_bf16(float f) {  // round to nearest even; a NaN stays a NaN
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

INLINE void bf16_store16(bf16 *p, vf v) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, 32);
#else
    for (int i = 0; i < LANES; i++) p[i] = f32_to_bf16(v[i]);
#endif
}

INLINE vf bf16_load16(const bf16 *p) {
#if defined(__AVX512F__)
    __m256i h;
    memcpy(&h, p, 32);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = bf16_to_f32(p[i]);
    return v;
#endif
}
