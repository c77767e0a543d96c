// Matrix products with weights in eight bits and activations as they are elsewhere. Included by linear.h for each
// element type.
//
// Packed operand ("unit"): 16 output columns; along K one group of GROUP8 after the other (the last may be shorter),
// each the 16 columns' scales as floats, then [elements][16] signed bytes. A weight is q * scale. Every q from -127 to
// 127 is a bfloat16 number, so the sum over a group is the chain that linear.h makes of such weights, with the same bits
// in every variant; groups are added in order of K, each by one multiply-add with its scale. Neither depends on how many
// rows take part.
//
// Formatted by hand, as linear.h is.
// clang-format off

#if STEP == 2 && HAS_DOT
#define LINE8 vi
#else
#define LINE8 vf
#endif

enum { NAME(PER_LINE8) = STEP == 2 && HAS_DOT ? 2 : 1 };  // elements of K in a line as it is multiplied

// The i-th line to be multiplied, of a group's bytes: pairs, or the elements of each pair as linear.h takes them.
INLINE LINE8 NAME(line8)(const int8_t *q, int i) {
#if STEP == 2 && HAS_DOT
    return bf16_pairs(int8_floats(q + 2 * i * LANES), int8_floats(q + (2 * i + 1) * LANES));
#elif STEP == 2
    return int8_floats(q + (i ^ 1) * LANES);
#else
    return int8_floats(q + i * LANES);
#endif
}

// acc += products of m_count rows' elements at x and a line of each of n_count units.
INLINE void NAME(add8)(int m_count, int n_count, const LINE8 *column, const A *x, long ldx, vf (*acc)[4]) {
#pragma GCC unroll 12
    for (int m = 0; m < m_count; m++) {
#if STEP == 2 && HAS_DOT
        int32_t pair;
        memcpy(&pair, x + m * ldx, 4);
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) acc[m][n] = bf16_dot(acc[m][n], column[n], pair);
#else
        const part spread = part_set(x[m * ldx]);
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) acc[m][n] = vf_fma_spread(column[n], spread, acc[m][n]);
#endif
    }
}

// Products of m_count rows and n_count units, which lie unit_size bytes apart, along k_size from the begin of a group
// on. `panel`: NULL, or the units' lines of 64 bytes as widen8 makes them, k_size / PER_LINE8 to a unit.
INLINE void NAME(tile8)(int m_count, int n_count, const char *unit, long unit_size, const char *panel, int k_size,
                        const A *x, long ldx, float *out, long ldo, int accumulate) {
    const long panel_size = (long)k_size / NAME(PER_LINE8) * 64;
    for (int begin = 0; begin < k_size; begin += GROUP8) {
        const int size = smaller(k_size - begin, GROUP8);
        const char *bytes = unit + 64;
        vf acc[TILE_ROWS][4];
#pragma GCC unroll 12
        for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
            for (int n = 0; n < n_count; n++) acc[m][n] = vf_set(0.0f);
        LINE8 column[4];
        if (panel)
            for (int k = 0; k < size; k += NAME(PER_LINE8), panel += 64) {
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) memcpy(&column[n], panel + n * panel_size, 64);
                NAME(add8)(m_count, n_count, column, x + k, ldx, acc);
            }
        else
            for (int k = 0; k < size; k += 4) {
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++)
                    __builtin_prefetch(bytes + k * LANES + n * unit_size + BYTES_AHEAD8, 0, 2);
#pragma GCC unroll 4
                for (int i = 0; i < 4 / NAME(PER_LINE8); i++) {
#pragma GCC unroll 4
                    for (int n = 0; n < n_count; n++)
                        column[n] = NAME(line8)((const int8_t *)hidden(bytes + k * LANES + n * unit_size), i);
                    NAME(add8)(m_count, n_count, column, x + k + i * NAME(PER_LINE8), ldx, acc);
                }
            }
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) {
            const vf scale = vf_load((const float *)(unit + n * unit_size));
#pragma GCC unroll 12
            for (int m = 0; m < m_count; m++) {
                float *total = out + m * ldo + n * LANES;
                vf_store(total, vf_fma(acc[m][n], scale, begin || accumulate ? vf_load(total) : vf_set(0.0f)));
            }
        }
        unit = bytes + size * LANES;
        x += size;
    }
}

// As tile_of in linear.h; with a panel, of 1 or 2 units.
static void NAME(tile8_of)(int m_count, int n_count, const char *unit, long unit_size, const char *panel, int k_size,
                           const A *x, long ldx, float *out, long ldo, int accumulate) {
#define CASE(M, N) \
    case (M) * 8 + (N): \
        NAME(tile8)(M, N, unit, unit_size, NULL, k_size, x, ldx, out, ldo, accumulate); \
        break;
#define WIDE(M, N) \
    case 128 + (M) * 8 + (N): \
        NAME(tile8)(M, N, unit, unit_size, panel, k_size, x, ldx, out, ldo, accumulate); \
        break;
    switch ((panel ? 128 : 0) + m_count * 8 + n_count) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) CASE(1, 2) CASE(1, 4)
        WIDE(1, 1) WIDE(2, 1) WIDE(3, 1) WIDE(4, 1) WIDE(5, 1) WIDE(6, 1)
#if PART_LANES == 16
        CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
        CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
        WIDE(7, 1) WIDE(8, 1) WIDE(9, 1) WIDE(10, 1) WIDE(11, 1) WIDE(12, 1)
        WIDE(1, 2) WIDE(2, 2) WIDE(3, 2) WIDE(4, 2) WIDE(5, 2) WIDE(6, 2)
        WIDE(7, 2) WIDE(8, 2) WIDE(9, 2) WIDE(10, 2) WIDE(11, 2) WIDE(12, 2)
#endif
        default: MG_ASSERT(!"no such tile");
    }
#undef CASE
#undef WIDE
}

// The lines of one unit along k_size, as they are multiplied.
INLINE void NAME(widen8)(const char *unit, int k_size, char *panel) {
    for (int begin = 0; begin < k_size; begin += GROUP8) {
        const int size = smaller(k_size - begin, GROUP8);
        unit += 64;
        for (int four = 0; four < size; four += 4, unit += 64) {
            __builtin_prefetch(unit + PANEL8 * LANES, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < 4 / NAME(PER_LINE8); i++, panel += 64) {
                const LINE8 line = NAME(line8)((const int8_t *)unit, i);
                memcpy(panel, &line, 64);
            }
        }
    }
}

// As multiply in linear.h, of one segment, along k_size from the begin of a group on. Many rows: each unit is widened
// once for all of them.
static void NAME(multiply8)(int m_count, int n_units, const char *unit, long unit_size, int k_size, const A *x,
                            long ldx, float *out, long ldo, int accumulate) {
    enum { PAIR = PART_LANES == 16 ? 2 : 1 };  // units that are widened together
    const int wide = m_count > 2 * TILE_ROWS && k_size <= PANEL8;
    _Alignas(64) char panel[PAIR * PANEL8 / NAME(PER_LINE8) * 64];
    for (int n = 0; n < n_units;) {
        const int left = n_units - n;
        const int most_units = wide ? PAIR : m_count <= QUAD_ROWS ? 4 : PAIR;
        const int n_count = most_units == 4 && left >= 4 ? 4 : most_units >= 2 && left >= 2 ? 2 : 1;
        const int most = NAME(tile_rows)(m_count, TILE_ROWS);
        const char *units = unit + n * unit_size;
        if (wide)
            for (int i = 0; i < n_count; i++)
                NAME(widen8)(units + i * unit_size, k_size, panel + (long)i * k_size / NAME(PER_LINE8) * 64);
        for (int m = 0; m < m_count; m += most)
            NAME(tile8_of)(smaller(m_count - m, most), n_count, units, unit_size, wide ? panel : NULL, k_size,
                           x + m * ldx, ldx, out + m * ldo + n * LANES, ldo, accumulate);
        n += n_count;
    }
}

#undef LINE8
