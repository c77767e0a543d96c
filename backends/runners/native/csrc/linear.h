// Matrix products with packed operands: the micro-kernel, and linear layers made of it. Included by transformer.h for
// each element type.
//
// Packed operand ("unit"): 16 output columns, [K / STEP][16][STEP]. A weight matrix [N, K] is N / 16 units one after
// the other. A page of keys is one unit per KV head whose columns are the 16 positions of the page and whose K is
// head_dim; a page of values is head_dim / 16 units per KV head whose K is the 16 positions. So one micro-kernel does
// the linear layers, q.K and p.V, and every output element is one chain of multiply-adds in order of K (bfloat16: of
// each pair of elements the second comes first, as the dot product of AVX-512 has it).
//
// The other operand, activations, is of type A: T, or, where there is no such dot product, floats rounded to T with the
// elements of each pair in the order in which they are multiplied.
//
// Formatted by hand: clang-format 14 takes a call NAME(f)(x) for a declaration.
// clang-format off

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

// Rounds to T and stores as A.
INLINE void NAME(put16)(A *p, vf v) {
#if STEP == 2 && !HAS_DOT
    vf_store(p, vf_swap_pairs(vf_round_bf16(v)));
#else
    NAME(store16)(p, v);
#endif
}

INLINE vf NAME(get16)(const A *p) {
#if STEP == 2 && !HAS_DOT
    return vf_swap_pairs(vf_load(p));
#else
    return NAME(load16)(p);
#endif
}

// Products of m_count rows and n_count units, which begin `offset` bytes into each segment and lie unit_stride bytes
// apart. See multiply. Lines that a tile will want in a moment are asked for: no hardware looks ahead far enough. Not so
// where one instruction takes a line for a row, and rows are one or two: nothing but memory is waited for then, and what
// is asked for past the end of a chunk, one line in twenty, is read for nothing.
INLINE void NAME(tile)(int m_count, int n_count, const T *const *segments, int n_segments, long offset,
                       long unit_stride, int steps, const A *x, long ldx, float *out, long ldo, int accumulate) {
    const int asked = !(STEP == 2 && HAS_DOT && m_count <= 2);
    vf acc[TILE_ROWS][4];
#pragma GCC unroll 12
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) acc[m][n] = accumulate ? vf_load(out + m * ldo + n * LANES) : vf_set(0.0f);
    for (int s = 0; s < n_segments; s++) {
        const char *unit = (const char *)segments[s] + offset;
        const A *xs = x + (long)s * steps * STEP;
        for (int k = 0; k < steps; k++) {
#if STEP == 2 && HAS_DOT
            vi column[4];
#pragma GCC unroll 4
            for (int n = 0; n < n_count; n++) column[n] = vi_load(unit + n * unit_stride);
#pragma GCC unroll 12
            for (int m = 0; m < m_count; m++) {
                int32_t pair;
                memcpy(&pair, xs + m * ldx + k * STEP, 4);
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) acc[m][n] = bf16_dot(acc[m][n], column[n], pair);
            }
#else
#pragma GCC unroll 2
            for (int j = 0; j < STEP; j++) {
                vf column[4];
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) {
                    const char *line = unit + n * unit_stride;
                    if (j) line = hidden(line);
                    column[n] = STEP == 1 ? vf_load((const float *)line) : j ? bf16_first(line) : bf16_second(line);
                }
#pragma GCC unroll 12
                for (int m = 0; m < m_count; m++) {
                    const part spread = part_set(xs[m * ldx + k * STEP + j]);
#pragma GCC unroll 4
                    for (int n = 0; n < n_count; n++) acc[m][n] = vf_fma_spread(column[n], spread, acc[m][n]);
                }
            }
#endif
            if (asked) {
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) __builtin_prefetch(unit + n * unit_stride + LINES_AHEAD * 64, 0, 2);
            }
            unit += 64;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) vf_store(out + m * ldo + n * LANES, acc[m][n]);
}

// One tile: n_count in {1, 2, 4}, and m_count at most TILE_ROWS, DOUBLE_ROWS or QUAD_ROWS.
static void NAME(tile_of)(int m_count, int n_count, const T *const *segments, int n_segments, long offset,
                          long unit_stride, int steps, const A *x, long ldx, float *out, long ldo, int accumulate) {
#define CASE(M, N) \
    case (M) * 8 + (N): \
        NAME(tile)(M, N, segments, n_segments, offset, unit_stride, steps, x, ldx, out, ldo, accumulate); \
        break;
    switch (m_count * 8 + n_count) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) CASE(1, 2) CASE(1, 4)
#if PART_LANES == 4
        CASE(2, 2)
#elif PART_LANES == 16
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
        CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
        CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
#endif
        default: MG_ASSERT(!"no such tile");
    }
#undef CASE
}

// Rows of tiles that share m_count rows evenly.
INLINE int NAME(tile_rows)(int m_count, int most) {
    const int passes = (m_count + most - 1) / most;
    return (m_count + passes - 1) / passes;
}

// out[m, n] (+)= sum over segments and k of x[m, k] * unit[n][k], for units that lie unit_stride elements apart.
static void NAME(multiply)(int m_count, int n_units, const T *const *segments, int n_segments, long unit_stride,
                           int steps, const A *x, long ldx, float *out, long ldo, int accumulate) {
#if STEP == 2 && !HAS_DOT
    // Many rows: each unit is made floats once for all of them.
    if (m_count > 2 * TILE_ROWS && n_segments == 1 && steps <= LINE_BLOCK) {
        const int most = NAME(tile_rows)(m_count, TILE_ROWS);
        _Alignas(64) float panel[LINE_BLOCK * STEP * LANES];
        const float *floats = panel;
        for (int n = 0; n < n_units; n++) {
            const T *line = *segments + n * unit_stride;
            for (int k = 0; k < steps; k++, line += LANES * STEP) {
                vf_store(panel + k * STEP * LANES, bf16_second(line));
                vf_store(panel + (k * STEP + 1) * LANES, bf16_first(line));
                __builtin_prefetch(line + LINE_BLOCK * STEP * LANES, 0, 2);
            }
            for (int m = 0; m < m_count; m += most)
                tile_of_f32(smaller(m_count - m, most), 1, &floats, 1, 0, 0, steps * STEP, x + m * ldx, ldx,
                            out + m * ldo + n * LANES, ldo, accumulate);
        }
        return;
    }
#endif
    for (int n = 0; n < n_units;) {
        const int left = n_units - n;
        const int n_count = left >= 4 && (PART_LANES == 16 || m_count <= QUAD_ROWS)   ? 4
                            : left >= 2 && (PART_LANES == 16 || m_count <= DOUBLE_ROWS) ? 2
                                                                                         : 1;
        const int most = NAME(tile_rows)(m_count, n_count == 4 ? QUAD_ROWS : n_count == 2 ? DOUBLE_ROWS : TILE_ROWS);
        for (int m = 0; m < m_count; m += most)
            NAME(tile_of)(smaller(m_count - m, most), n_count, segments, n_segments,
                          n * unit_stride * sizeof(T), unit_stride * sizeof(T), steps, x + m * ldx, ldx,
                          out + m * ldo + n * LANES, ldo, accumulate);
        n += n_count;
    }
}

#include "weights8.h"

// x [rows, k_size] times packed weights of `units` units (in8: packed as weights8.h has it), inside a parallel region.
// Work is handed out in chunks of columns on demand, so a busy core slows the step by its share only. Several tiles of
// rows take a chunk in blocks along K, so that its weights come from memory once, while there is arithmetic to wait for
// them. Epilogues:
//   STORE       out[row, n] = y (+ bias[n])
//   ADD         out[row, n] += y
//   SILU_MUL    units come in (gate, up) pairs; act[row, n / 2] = silu(gate) * up
//   STORE_SILU  act[row, n] = silu(y + bias[n])
static void NAME(linear)(mg_member *member, mg_epilogue epilogue, const A *x, long ldx, int rows, int k_size,
                         const void *weights, int in8, int units, const float *bias, float *out, long ldo, A *act,
                         long lda) {
    const int wide = units >= 128 ? 4 : 2;
    const int chunks = (units + wide - 1) / wide;
    const long unit_size = in8 ? size8(k_size) : (long)k_size * LANES * (long)sizeof(T);
    const int longest = in8 ? PANEL8 : LINE_BLOCK * STEP;
    TEAM_CLAIMED(chunk, chunks) {
        const int first = chunk * wide, width = smaller(units - first, wide);
        _Alignas(64) float y[ROW_BLOCK][4 * LANES];
        for (int row = 0; row < rows; row += ROW_BLOCK) {
            const int m_count = smaller(rows - row, ROW_BLOCK);
            const int block = m_count > (in8 ? TILE_ROWS : BLOCKED_ROWS) ? longest : k_size;
            for (int k = 0; k < k_size; k += block) {
                const char *units_at = (const char *)weights + first * unit_size;
                const T *unit = (const T *)units_at + (long)k * LANES;
                const A *xs = x + row * ldx + k;
                const int size = smaller(k_size - k, block);
                if (in8)
                    NAME(multiply8)(m_count, width, units_at + size8(k), unit_size, size, xs, ldx, y[0], 4 * LANES,
                                    k > 0);
                else
                    NAME(multiply)(m_count, width, &unit, 1, unit_size / (long)sizeof(T), size / STEP, xs, ldx, y[0],
                                   4 * LANES, k > 0);
            }
            for (int m = 0; m < m_count; m++)
                for (int n = 0; n < width; n++) {
                    const long column = (long)(first + n) * LANES;
                    vf v = vf_load(&y[m][n * LANES]);
                    if (bias) v = vf_add(v, vf_load(bias + column));
                    switch (epilogue) {
                        case STORE: vf_store(out + (row + m) * ldo + column, v); break;
                        case ADD: {
                            float *target = out + (row + m) * ldo + column;
                            vf_store(target, vf_add(vf_load(target), v));
                            break;
                        }
                        case SILU_MUL:
                            if (n % 2 == 0)
                                NAME(put16)(act + (row + m) * lda + column / 2,
                                            vf_mul(vf_silu(v), vf_load(&y[m][(n + 1) * LANES])));
                            break;
                        case STORE_SILU: NAME(put16)(act + (row + m) * lda + column, vf_silu(v)); break;
                    }
                }
        }
    }
    team_end_loop(member);
}
