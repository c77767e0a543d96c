// Matrix products with packed operands: the micro-kernel, and linear layers made of it. Included by transformer.h for
// each element type.
//
// Packed operand ("unit"): 16 output columns, [K / STEP][16][STEP]. A weight matrix [N, K] is N / 16 units one after
// the other. A page of keys is one unit per KV head whose columns are the 16 positions of the page and whose K is
// head_dim; a page of values is head_dim / 16 units per KV head whose K is the 16 positions. So one micro-kernel does
// the linear layers, q.K and p.V, and every output element is one chain of multiply-adds in order of K.
//
// Formatted by hand: clang-format 14 takes a call NAME(f)(x) for a declaration.
// clang-format off

// acc + unit * x along STEP elements of K, for 16 columns. x comes from NAME(spread): read once for all units
// of a tile.
#if STEP == 1
typedef vf NAME(spread_t);
INLINE NAME(spread_t) NAME(spread)(const T *x) { return vf_set(*x); }
INLINE vf NAME(step)(vf acc, vf unit, NAME(spread_t) x) { return vf_fma(unit, x, acc); }
#elif defined(__AVX512BF16__)
typedef vi NAME(spread_t);
INLINE NAME(spread_t) NAME(spread)(const T *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vi)_mm512_set1_epi32(pair);
}
INLINE vf NAME(step)(vf acc, vf unit, NAME(spread_t) x) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)unit, (__m512bh)x);
}
#else
typedef struct {
    vf even, odd;
} NAME(spread_t);
INLINE NAME(spread_t) NAME(spread)(const T *x) {
    return (NAME(spread_t)){vf_set(bf16_to_f32(x[0])), vf_set(bf16_to_f32(x[1]))};
}
INLINE vf NAME(step)(vf acc, vf unit, NAME(spread_t) x) {
    const vi both = (vi)unit;
    acc = vf_fma((vf)(both << 16), x.even, acc);
    return vf_fma((vf)(both & (int32_t)0xffff0000), x.odd, acc);
}
#endif

// See multiply. `ahead`: units of the same shape that will be wanted next; where there are none, the constant NULL, so
// that no branch is left in the loop.
INLINE void NAME(tile)(int m_count, int n_count, const T *const *segments, int n_segments, long unit_stride,
                       int steps, const T *x, long ldx, float *out, long ldo, int accumulate, const T *ahead) {
    vf acc[MAX_TILE_ROWS][4];
#pragma GCC unroll 12
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) acc[m][n] = accumulate ? vf_load(out + m * ldo + n * LANES) : vf_set(0.0f);
    for (int s = 0; s < n_segments; s++) {
        const T *unit = segments[s];
        const T *xs = x + (long)s * steps * STEP;
        for (int k = 0; k < steps; k++) {
            vf column[4];
#pragma GCC unroll 4
            for (int n = 0; n < n_count; n++) memcpy(&column[n], unit + n * unit_stride, 64);
#pragma GCC unroll 12
            for (int m = 0; m < m_count; m++) {
                const NAME(spread_t) operand = NAME(spread)(xs + m * ldx + k * STEP);
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) acc[m][n] = NAME(step)(acc[m][n], column[n], operand);
            }
            unit += LANES * STEP;
            if (ahead) {
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) __builtin_prefetch(ahead + n * unit_stride, 0, 2);
                ahead += LANES * STEP;
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) vf_store(out + m * ldo + n * LANES, acc[m][n]);
}

// Accumulators and operands of a tile must fit 32 vector registers.
INLINE int NAME(max_rows)(int n_units) { return n_units == 4 ? WIDE_TILE_ROWS : MAX_TILE_ROWS; }

// out[m, n] (+)= sum over segments and k of x[m, k] * unit[n][k]; n_units in {1, 2, 4}, m_count at most
// NAME(max_rows)(n_units). High tiles of four units read `ahead`: they have arithmetic enough to wait for it.
static void NAME(multiply)(int m_count, int n_units, const T *const *segments, int n_segments, long unit_stride,
                           int steps, const T *x, long ldx, float *out, long ldo, int accumulate, const T *ahead) {
#define CASE(M, N) \
    case (M) * 8 + (N): \
        NAME(tile)(M, N, segments, n_segments, unit_stride, steps, x, ldx, out, ldo, accumulate, NULL); \
        break;
#define CASE_AHEAD(M, N) \
    case (M) * 8 + (N): \
        if (ahead) NAME(tile)(M, N, segments, n_segments, unit_stride, steps, x, ldx, out, ldo, accumulate, ahead); \
        else NAME(tile)(M, N, segments, n_segments, unit_stride, steps, x, ldx, out, ldo, accumulate, NULL); \
        break;
    switch (m_count * 8 + n_units) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE_AHEAD(5, 4) CASE_AHEAD(6, 4)
        default: MG_ASSERT(!"no such tile");
    }
#undef CASE_AHEAD
#undef CASE
}

INLINE void NAME(store16)(T *p, vf v) {
#if STEP == 1
    vf_store(p, v);
#else
    bf16_store16(p, v);
#endif
}

INLINE vf NAME(load16)(const T *p) {
#if STEP == 1
    return vf_load(p);
#else
    return bf16_load16(p);
#endif
}

// x [rows, k_size] times packed weights of `units` units, inside a parallel region. Work is handed out in chunks of
// columns on demand, so a busy core slows the step by its share only. Epilogues:
//   STORE       out[row, n] = y (+ bias[n])
//   ADD         out[row, n] += y
//   SILU_MUL    units come in (gate, up) pairs; act[row, n / 2] = silu(gate) * up
//   STORE_SILU  act[row, n] = silu(y + bias[n])
static void NAME(linear)(mg_member *member, mg_epilogue epilogue, const T *x, long ldx, int rows, int k_size,
                         const T *weights, int units, const float *bias, float *out, long ldo, T *act, long lda) {
    const int wide = units >= 128 ? 4 : 2;
    const int chunks = (units + wide - 1) / wide;
    TEAM_CLAIMED(chunk, chunks) {
        const int first = chunk * wide;
        const int width = units - first < wide ? units - first : wide;
        float y[MAX_TILE_ROWS][4 * LANES];
        // The second pass finds its weights in the cache and reads ahead, so it should be long enough for that.
        const int most = NAME(max_rows)(width), passes = (rows + most - 1) / most;
        const int step = passes == 2 && rows > most + 2 ? (rows + 1) / 2 : most;
        for (int row = 0; row < rows; row += step) {
            const int m_count = rows - row < step ? rows - row : step;
            for (int n = 0; n < width;) {
                const int n_count = width - n >= 4 ? 4 : width - n >= 2 ? 2 : 1;
                const T *unit = weights + (long)(first + n) * k_size * LANES;
                // Most often the chunk that this thread claims next.
                const int next = first + n + member->team->size * wide;
                const T *ahead = row == step && next + n_count <= units ? weights + (long)next * k_size * LANES : NULL;
                NAME(multiply)(m_count, n_count, &unit, 1, (long)k_size * LANES, k_size / STEP, x + row * ldx, ldx,
                               &y[0][n * LANES], 4 * LANES, 0, ahead);
                n += n_count;
            }
            for (int m = 0; m < m_count; m++)
                for (int n = 0; n < width; n++) {
                    const long column = (long)(first + n) * LANES;
                    vf v = vf_load(&y[m][n * LANES]);
                    if (bias) v += vf_load(bias + column);
                    switch (epilogue) {
                        case STORE: vf_store(out + (row + m) * ldo + column, v); break;
                        case ADD: {
                            float *target = out + (row + m) * ldo + column;
                            vf_store(target, vf_load(target) + v);
                            break;
                        }
                        case SILU_MUL:
                            if (n % 2 == 0)
                                NAME(store16)(act + (row + m) * lda + column / 2,
                                              vf_silu(v) * vf_load(&y[m][(n + 1) * LANES]));
                            break;
                        case STORE_SILU: NAME(store16)(act + (row + m) * lda + column, vf_silu(v)); break;
                    }
                }
        }
    }
    team_end_loop(member);
}
