// One packed forward of a Llama-shaped decoder, for one element type. Included twice by kernels.c, with
//   T        element type of weights, activations and KV pages (bf16 or float)
//   STEP     elements of T that one multiply-add consumes along the reduced dimension (2 or 1)
//   NAME(x)  the symbol's name for this type
//
// Packed operand ("unit"): 16 output columns, [K / STEP][16][STEP]. A weight matrix [N, K] is N / 16 units one after
// the other. A page of keys is one unit per KV head whose columns are the 16 positions of the page and whose K is
// head_dim; a page of values is head_dim / 16 units per KV head whose K is the 16 positions. So one micro-kernel does
// the linear layers, q.K and p.V, and every output element is one chain of multiply-adds in order of K.

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
typedef struct { vf even, odd; } NAME(spread_t);
INLINE NAME(spread_t) NAME(spread)(const T *x) {
    return (NAME(spread_t)){vf_set(bf16_to_f32(x[0])), vf_set(bf16_to_f32(x[1]))};
}
INLINE vf NAME(step)(vf acc, vf unit, NAME(spread_t) x) {
    const vi both = (vi)unit;
    acc = vf_fma((vf)(both << 16), x.even, acc);
    return vf_fma((vf)(both & (int32_t)0xffff0000), x.odd, acc);
}
#endif

// See multiply. `ahead`: units of the same shape that will be wanted next; where there are none, the constant NULL, so that
// no branch is left in the loop.
INLINE void NAME(tile)(int m_count, int n_count, const T *const *segments, int n_segments, long unit_stride,
                       int steps, const T *x, long ldx, float *out, long ldo, int accumulate, const T *ahead) {
    vf acc[12][4];
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
INLINE int NAME(max_rows)(int n_units) { return n_units == 4 ? 6 : 12; }

// out[m, n] (+)= sum over segments and k of x[m, k] * unit[n][k]; n_units in {1, 2, 4}, m_count at most NAME(max_rows)(n_units).
// High tiles of four units read `ahead`: they have arithmetic enough to wait for it.
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

INLINE T NAME(from_float)(float f) {
#if STEP == 1
    return f;
#else
    return f32_to_bf16(f);
#endif
}

// x [rows, k_size] times packed weights of `units` units, inside a parallel region. Work is handed out in chunks of
// columns on demand, so a busy core slows the step by its share only. Epilogues:
//   STORE       out[row, n] = y (+ bias[n])
//   ADD         out[row, n] += y
//   SILU_MUL    units come in (gate, up) pairs; act[row, n / 2] = silu(gate) * up
//   STORE_SILU  act[row, n] = silu(y + bias[n])
static void NAME(linear)(mg_member *member, mg_epilogue epilogue, const T *x, long ldx, int rows, int k_size, const T *weights,
                         int units, const float *bias, float *out, long ldo, T *act, long lda) {
    const int wide = units >= 128 ? 4 : 2;
    const int chunks = (units + wide - 1) / wide;
    TEAM_CLAIMED(chunk, chunks) {
        const int first = chunk * wide;
        const int width = units - first < wide ? units - first : wide;
        float y[12][4 * LANES];
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

INLINE void NAME(rms_norm)(const float *x, const float *weight, int size, float eps, T *out) {
    vf squares = vf_set(0.0f);
    for (int i = 0; i < size; i += LANES) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    const vf scale = vf_set(1.0f / sqrtf(vf_sum(squares) / size + eps));
    for (int i = 0; i < size; i += LANES) NAME(store16)(out + i, vf_load(x + i) * scale * vf_load(weight + i));
}

// In place: optional per-head RMS norm (Qwen 3), then rotary embedding in the half-split convention.
INLINE void NAME(norm_and_rotate)(float *x, const float *norm, const float *cos, const float *sin, int size, float eps) {
    if (norm) {
        vf squares = vf_set(0.0f);
        for (int i = 0; i < size; i += LANES) squares = vf_fma(vf_load(x + i), vf_load(x + i), squares);
        const vf scale = vf_set(1.0f / sqrtf(vf_sum(squares) / size + eps));
        for (int i = 0; i < size; i += LANES) vf_store(x + i, vf_load(x + i) * scale * vf_load(norm + i));
    }
    const int half = size / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vf a = vf_load(x + i), b = vf_load(x + i + half), c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(x + i, vf_fma(a, c, -(b * s)));
        vf_store(x + i + half, vf_fma(b, c, a * s));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        x[i + half] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

// Strided element access of one position inside a page of one KV head.
INLINE T *NAME(key_at)(T *page, int position, int d) { return page + (d / STEP) * LANES * STEP + position * STEP + d % STEP; }
INLINE T *NAME(value_at)(T *page, int position, int d) {
    return page + (d / LANES) * LANES * LANES + (position / STEP) * LANES * STEP + (d % LANES) * STEP + position % STEP;
}

// The first n positions (n < 16) of a page of one KV head; the rest become zeros.
INLINE void NAME(copy_first)(T *k_to, T *v_to, const T *k_from, const T *v_from, int n, int head_dim) {
    const vi place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi wanted = place < (vi){n, n, n, n, n, n, n, n, n, n, n, n, n, n, n, n};
    for (int i = 0; i < head_dim * LANES; i += LANES * STEP) {
        vi line;
        memcpy(&line, k_from + i, 64);
        line &= wanted;
        memcpy(k_to + i, &line, 64);
        const int left = n - i / LANES % LANES;  // lanes of a line of values are dimensions, its elements positions
        memcpy(&line, v_from + i, 64);
        line &= left >= STEP ? ~(vi){0} : left <= 0 ? (vi){0} : (vi){0} + 0xffff;
        memcpy(v_to + i, &line, 64);
    }
}

INLINE void NAME(prefetch)(const T *from, long elements) {
    for (long i = 0; i < elements; i += 64 / (long)sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

INLINE void NAME(copy_position)(T *k_to, T *v_to, int to, T *k_from, T *v_from, int from, int head_dim) {
    for (int d = 0; d < head_dim; d += STEP)
        memcpy(NAME(key_at)(k_to, to, d), NAME(key_at)(k_from, from, d), sizeof(T) * STEP);
    for (int d = 0; d < head_dim; d++) *NAME(value_at)(v_to, to, d) = *NAME(value_at)(v_from, from, d);
}

typedef struct { T *x_norm, *q, *attention, *act; float *residual, *qkv; size_t scratch_size; } NAME(buffers);

// Attention of rows [first, first + count), which belong to one sequence and share their full pages, for one KV head.
// Positions are walked in pages of 16 by *absolute* position; the keys that are not yet in a full page of their own
// path (the ragged end and the row's candidate ancestors) are first gathered into pages in path order.
static void NAME(attend)(const mg_model *model, const mg_batch *batch, NAME(buffers) *b, long layer_offset,
                         int first, int count, int kv_head, char *scratch_start) {
    const int head_dim = model->head_dim, group = model->heads / model->kv_heads, rows_m = count * group;
    const int full = batch->full_pages[first];
    const long page_size = (long)model->kv_heads * head_dim * LANES, head_size = (long)head_dim * LANES;
    const int32_t *pages = batch->pages + batch->page_offsets[batch->sequence[first]];
    const int width = (full + 2) * LANES;
    T *k_pool = (T *)model->k_pool + layer_offset, *v_pool = (T *)model->v_pool + layer_offset;

    char *scratch = scratch_start;
    const T **segments = (const T **)scratch;
    scratch += sizeof(T *) * (size_t)(full + 1);
    scratch = (char *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    float *scores = (float *)scratch;
    scratch += sizeof(float) * (size_t)rows_m * width;
    float *out = (float *)scratch;
    scratch += sizeof(float) * (size_t)rows_m * head_dim;
    T *q = (T *)scratch;
    scratch += sizeof(float) * (size_t)rows_m * head_dim;
    T *weights = (T *)scratch;
    scratch += sizeof(float) * (size_t)rows_m * width;
    T *k_tail = (T *)scratch, *v_tail = k_tail + (size_t)count * TAIL_PAGES * head_size;
    float *norm = (float *)(v_tail + (size_t)count * TAIL_PAGES * head_size);
    MG_ASSERT((char *)(norm + rows_m) <= scratch_start + b->scratch_size);

    for (int r = 0; r < count; r++)
        if (batch->tail_offsets[first + r] < batch->tail_offsets[first + r + 1]) {
            const long last = batch->tail_slots[batch->tail_offsets[first + r]] / LANES * page_size + kv_head * head_size;
            NAME(prefetch)(k_pool + last, head_size);
            NAME(prefetch)(v_pool + last, head_size);
        }
    const size_t q_bytes = sizeof(T) * (size_t)group * head_dim;
    for (int r = 0; r < count; r++)
        memcpy(q + (long)r * group * head_dim,
               b->q + (long)(first + r) * model->heads * head_dim + (long)kv_head * group * head_dim, q_bytes);

    // Pages lie anywhere, so no hardware looks ahead for the next one.
    for (int p = 0; p < full && p < PAGES_AHEAD; p++)
        NAME(prefetch)(k_pool + pages[p] * page_size + kv_head * head_size, head_size);
    for (int p = 0; p < full;) {
        // Neighbours in the pool are multiplied together: more chains at once.
        int n = 1;
        while (n < 4 && p + n < full && pages[p + n] == pages[p] + n) n++;
        if (n == 3) n = 2;
        for (int ahead = p; ahead < p + n; ahead++) {
            if (ahead + PAGES_AHEAD < full)
                NAME(prefetch)(k_pool + pages[ahead + PAGES_AHEAD] * page_size + kv_head * head_size, head_size);
            NAME(prefetch)(v_pool + pages[ahead] * page_size + kv_head * head_size, head_size);
        }
        const T *page = k_pool + pages[p] * page_size + kv_head * head_size;
        const int step = NAME(max_rows)(n);
        for (int m = 0; m < rows_m; m += step)
            NAME(multiply)(rows_m - m < step ? rows_m - m : step, n, &page, 1, page_size, head_dim / STEP, q + m * head_dim,
                           head_dim, scores + (long)m * width + p * LANES, width, 0, NULL);
        p += n;
    }
    int tail_pages[MAX_TILE_ROWS];
    for (int r = 0; r < count; r++) {
        const int32_t *slots = batch->tail_slots + batch->tail_offsets[first + r];
        const int n = batch->tail_offsets[first + r + 1] - batch->tail_offsets[first + r];
        T *k_page = k_tail + (long)r * TAIL_PAGES * head_size, *v_page = v_tail + (long)r * TAIL_PAGES * head_size;
        tail_pages[r] = (n + LANES - 1) / LANES;
        MG_ASSERT(tail_pages[r] <= TAIL_PAGES);
        // What the rows of a sequence share lies in its last page as it should; the row's own path is put behind it.
        int shared = 0;
        while (shared < n && shared < LANES && slots[shared] == slots[0] + shared && slots[shared] % LANES == shared) shared++;
        if (tail_pages[r]) {
            const long from = (slots[0] / LANES) * page_size + kv_head * head_size;
            NAME(copy_first)(k_page, v_page, k_pool + from, v_pool + from, shared, head_dim);
        }
        if (tail_pages[r] > 1) {
            memset(k_page + head_size, 0, sizeof(T) * head_size);
            memset(v_page + head_size, 0, sizeof(T) * head_size);
        }
        for (int i = shared; i < n; i++) {
            const long from = (slots[i] / LANES) * page_size + kv_head * head_size;
            NAME(copy_position)(k_page + (i / LANES) * head_size, v_page + (i / LANES) * head_size, i % LANES,
                                k_pool + from, v_pool + from, slots[i] % LANES, head_dim);
        }
        for (int p = 0; p < tail_pages[r]; p++) {
            const T *page = k_page + p * head_size;
            for (int m = r * group; m < (r + 1) * group; m += 6) {
                const int m_count = (r + 1) * group - m < 6 ? (r + 1) * group - m : 6;
                float *target = scores + (long)m * width + (full + p) * LANES;
                NAME(multiply)(m_count, 1, &page, 1, 0, head_dim / STEP, q + m * head_dim, head_dim, target, width, 0, NULL);
                for (int j = 0; j < m_count; j++)
                    for (int i = n - p * LANES; i < LANES; i++) target[(long)j * width + i] = -1e30f;
            }
        }
    }
    for (int m = 0; m < rows_m; m++) {
        const int used = full + tail_pages[m / group];
        float *row = scores + (long)m * width;
        vf top = vf_set(-1e30f);
        for (int p = 0; p < used; p++) top = vf_max(top, vf_load(row + p * LANES));
        const vf scale = vf_set(model->scale), highest = vf_set(vf_hmax(top) * model->scale);
        vf sum = vf_set(0.0f);
        for (int p = 0; p < used; p++) {
            const vf e = vf_exp(vf_fma(vf_load(row + p * LANES), scale, -highest));
            sum += e;
            NAME(store16)(weights + (long)m * width + p * LANES, e);
        }
        norm[m] = 1.0f / vf_sum(sum);
    }
    for (int p = 0; p < full; p++) segments[p] = v_pool + pages[p] * page_size + kv_head * head_size;
    const int d_units = head_dim / LANES;
    for (int d = 0; d < d_units;) {
        const int d_count = d_units - d >= 4 ? 4 : d_units - d >= 2 ? 2 : 1;
        for (int m = 0; m < rows_m; m += 6)
            NAME(multiply)(rows_m - m < 6 ? rows_m - m : 6, d_count, segments, full, LANES * LANES, LANES / STEP,
                           weights + (long)m * width, width, out + (long)m * head_dim + d * LANES, head_dim, 0, NULL);
        for (int r = 0; r < count; r++)
            for (int p = 0; p < tail_pages[r]; p++) {
                const T *page = v_tail + ((long)r * TAIL_PAGES + p) * head_size + d * LANES * LANES;
                for (int m = r * group; m < (r + 1) * group; m += 6)
                    NAME(multiply)((r + 1) * group - m < 6 ? (r + 1) * group - m : 6, d_count, &page, 1, LANES * LANES,
                                   LANES / STEP, weights + (long)m * width + (full + p) * LANES, width,
                                   out + (long)m * head_dim + d * LANES, head_dim, 1, NULL);
            }
        d += d_count;
        for (int p = 0; p < full; p++) segments[p] += (long)d_count * LANES * LANES;
    }
    for (int m = 0; m < rows_m; m++)
        for (int d = 0; d < head_dim; d += LANES)
            NAME(store16)(b->attention + (long)(first + m / group) * model->heads * head_dim +
                              (long)(kv_head * group + m % group) * head_dim + d,
                          vf_load(out + (long)m * head_dim + d) * vf_set(norm[m]));
}

typedef struct {
    const mg_model *model;
    const mg_batch *batch;
    mg_workspace *ws;
    int n_tiles;
    T *hidden_out;
} NAME(forward_job);

// Norms of all rows into x_norm.
INLINE void NAME(norm_rows)(mg_member *member, const NAME(buffers) *b, const float *weight, int rows, int hidden, float eps) {
    TEAM_DEALT(row, rows)
        NAME(rms_norm)(b->residual + (long)row * hidden, weight, hidden, eps, b->x_norm + (long)row * hidden);
    team_end_loop(member);
}

// Rotary embedding of one row; its query goes to b->q, its key and value to the row's slot.
static void NAME(place_row)(const mg_model *model, const mg_batch *batch, const mg_layer *layer, const NAME(buffers) *b,
                            long layer_offset, int row) {
    const int head_dim = model->head_dim, q_size = model->heads * head_dim, kv_size = model->kv_heads * head_dim;
    float *x = b->qkv + (long)row * (q_size + 2 * kv_size);
    const float *cos = model->cos + (long)batch->positions[row] * (head_dim / 2);
    const float *sin = model->sin + (long)batch->positions[row] * (head_dim / 2);
    for (int h = 0; h < model->heads; h++)
        NAME(norm_and_rotate)(x + h * head_dim, layer->q_norm, cos, sin, head_dim, model->eps);
    for (int i = 0; i < q_size; i += LANES) NAME(store16)(b->q + (long)row * q_size + i, vf_load(x + i));
    const int slot = batch->slots[row], place = slot % LANES;
    const long page = layer_offset + (slot / LANES) * (long)kv_size * LANES;
    for (int h = 0; h < model->kv_heads; h++) {
        float *k = x + q_size + h * head_dim, *v = k + kv_size;
        T *k_page = (T *)model->k_pool + page + (long)h * head_dim * LANES;
        T *v_page = (T *)model->v_pool + page + (long)h * head_dim * LANES;
        NAME(norm_and_rotate)(k, layer->k_norm, cos, sin, head_dim, model->eps);
        for (int d = 0; d < head_dim; d += LANES) {
            T rounded[LANES];
            NAME(store16)(rounded, vf_load(k + d));
            for (int i = 0; i < LANES; i += STEP) memcpy(NAME(key_at)(k_page, place, d + i), rounded + i, sizeof(T) * STEP);
            NAME(store16)(rounded, vf_load(v + d));
            for (int i = 0; i < LANES; i++) *NAME(value_at)(v_page, place, d + i) = rounded[i];
        }
    }
}

static void NAME(forward_member)(mg_member *member, void *arguments) {
    const NAME(forward_job) *job = arguments;
    const mg_model *model = job->model;
    const mg_batch *batch = job->batch;
    mg_workspace *ws = job->ws;
    NAME(buffers) b = {ws->x_norm, ws->q, ws->attention, ws->act, ws->residual, ws->qkv, ws->scratch_size};
    const int rows = batch->rows, hidden = model->hidden, q_size = model->heads * model->head_dim;
    const int kv_size = model->kv_heads * model->head_dim, qkv_size = q_size + 2 * kv_size;
    const long layer_stride = model->pages * (long)kv_size * LANES;
    char *scratch = ws->scratch + (size_t)member->index * ws->scratch_size;
    TEAM_DEALT(row, rows)
        for (int i = 0; i < hidden; i += LANES)
            vf_store(b.residual + (long)row * hidden + i,
                     NAME(load16)((const T *)model->embed + (long)batch->tokens[row] * hidden + i));
    team_end_loop(member);
    for (int l = 0; l < model->layers; l++) {
        const mg_layer *layer = model->layer + l;
        const long offset = l * layer_stride;
        NAME(norm_rows)(member, &b, layer->attention_norm, rows, hidden, model->eps);
        NAME(linear)(member, STORE, b.x_norm, hidden, rows, hidden, layer->qkv, qkv_size / LANES, layer->qkv_bias, b.qkv,
                     qkv_size, NULL, 0);
        TEAM_DEALT(row, rows) NAME(place_row)(model, batch, layer, &b, offset, row);
        team_end_loop(member);
        TEAM_CLAIMED(task, job->n_tiles * model->kv_heads) {
            const int32_t *tile = ws->tiles + 2 * (task / model->kv_heads);
            NAME(attend)(model, batch, &b, offset, tile[0], tile[1], task % model->kv_heads, scratch);
        }
        team_end_loop(member);
        NAME(linear)(member, ADD, b.attention, q_size, rows, q_size, layer->o, hidden / LANES, NULL, b.residual, hidden,
                     NULL, 0);
        NAME(norm_rows)(member, &b, layer->mlp_norm, rows, hidden, model->eps);
        NAME(linear)(member, SILU_MUL, b.x_norm, hidden, rows, hidden, layer->gate_up, 2 * model->intermediate / LANES,
                     NULL, NULL, 0, b.act, model->intermediate);
        NAME(linear)(member, ADD, b.act, model->intermediate, rows, model->intermediate, layer->down, hidden / LANES, NULL,
                     b.residual, hidden, NULL, 0);
    }
    TEAM_DEALT(i, batch->out_rows)
        NAME(rms_norm)(b.residual + (long)batch->out_row[i] * hidden, model->final_norm, hidden, model->eps,
                       job->hidden_out + (long)i * hidden);
    team_end_loop(member);
}

static void NAME(forward)(mg_pool *pool, const mg_model *model, const mg_batch *batch, mg_workspace *ws, T *hidden_out) {
    // Rows of one sequence that share their full pages attend together, as many as fill a tile of the micro-kernel.
    const int group = model->heads / model->kv_heads, rows_per_tile = group >= MAX_TILE_ROWS ? 1 : MAX_TILE_ROWS / group;
    int n_tiles = 0;
    for (int row = 0; row < batch->rows; row++) {
        int32_t *last = ws->tiles + 2 * (n_tiles - 1);
        if (n_tiles && last[1] < rows_per_tile && batch->sequence[last[0]] == batch->sequence[row] &&
            batch->full_pages[last[0]] == batch->full_pages[row])
            last[1]++;
        else {
            ws->tiles[2 * n_tiles] = row;
            ws->tiles[2 * n_tiles++ + 1] = 1;
        }
    }
    NAME(forward_job) job = {model, batch, ws, n_tiles, hidden_out};
    pool_run(pool, NAME(forward_member), &job);
}

typedef struct {
    const T *x, *weights;
    int rows, k_size, units;
    float *out;
} NAME(project_job);

static void NAME(project_member)(mg_member *member, void *arguments) {
    const NAME(project_job) *job = arguments;
    NAME(linear)(member, STORE, job->x, job->k_size, job->rows, job->k_size, job->weights, job->units, NULL, job->out,
                 (long)job->units * LANES, NULL, 0);
}

typedef struct {
    const mg_heads *heads;
    const T *x_in, *x;
    int n;
    T *act, *state_t;
    float *state, *logits;
} NAME(heads_job);

// Medusa heads: for each head h, state = x + down_h . silu(up_h . x_in + bias_h), then logits over the draft vocabulary.
static void NAME(heads_member)(mg_member *member, void *arguments) {
    const NAME(heads_job) *job = arguments;
    const mg_heads *heads = job->heads;
    const int up = heads->heads * heads->inner, hidden = heads->hidden, n = job->n;
    NAME(linear)(member, STORE_SILU, job->x_in, heads->in_size, n, heads->in_size, heads->up, up / LANES, heads->up_bias,
                 NULL, 0, job->act, up);
    for (int h = 0; h < heads->heads; h++)
        NAME(linear)(member, STORE, job->act + (long)h * heads->inner, up, n, heads->inner,
                     (const T *)heads->down + (long)h * hidden * heads->inner, hidden / LANES, NULL,
                     job->state + (long)h * n * hidden, hidden, NULL, 0);
    TEAM_DEALT(r, heads->heads * n)
        for (int i = 0; i < hidden; i += LANES)
            NAME(store16)(job->state_t + (long)r * hidden + i, vf_load(job->state + (long)r * hidden + i) +
                                                                   NAME(load16)(job->x + (long)(r % n) * hidden + i));
    team_end_loop(member);
    NAME(linear)(member, STORE, job->state_t, hidden, heads->heads * n, hidden, heads->draft_lm_head,
                 heads->draft_vocab_padded / LANES, NULL, job->logits, heads->draft_vocab_padded, NULL, 0);
}

typedef struct {
    const mg_heads *heads;
    mg_follow *follow;
    const T *hidden;
    T *x_in, *act, *states[2];
    float *sums, *logits;
} NAME(follow_job);

// [x / rms(x); e / rms(e)] of a state and an embedding.
INLINE void NAME(block_input)(const T *state, const T *embedding, int size, T *out) {
    const T *parts[2] = {state, embedding};
    for (int part = 0; part < 2; part++) {
        vf squares = vf_set(0.0f);
        for (int i = 0; i < size; i += LANES) {
            const vf v = NAME(load16)(parts[part] + i);
            squares = vf_fma(v, v, squares);
        }
        const vf scale = vf_set(1.0f / sqrtf(vf_sum(squares) / size + (part ? 1e-12f : 1e-6f)));
        for (int i = 0; i < size; i += LANES) NAME(store16)(out + part * size + i, NAME(load16)(parts[part] + i) * scale);
    }
}

// Sequential heads, level by level: the state of a list of guesses comes from the state of the list above it and the token
// chosen from that.
static void NAME(follow_member)(mg_member *member, void *arguments) {
    const NAME(follow_job) *job = arguments;
    const mg_heads *heads = job->heads;
    mg_follow *follow = job->follow;
    const int hidden = heads->hidden, inner = heads->inner, in_size = heads->in_size, width = heads->draft_vocab_padded;
    const T *above = job->hidden;
    for (int level = 0; level < heads->heads; level++) {
        const int rows = follow->rows;
        T *states = job->states[level % 2];
        if (!rows) break;
        TEAM_DEALT(r, rows)
            NAME(block_input)(above + (long)follow->from[r] * hidden, (const T *)heads->embed + (long)follow->token[r] * hidden,
                              hidden, job->x_in + (long)r * in_size);
        team_end_loop(member);
        NAME(linear)(member, STORE_SILU, job->x_in, in_size, rows, in_size, (const T *)heads->up + (long)level * inner * in_size,
                     inner / LANES, heads->up_bias + (long)level * inner, NULL, 0, job->act, inner);
        NAME(linear)(member, STORE, job->act, inner, rows, inner, (const T *)heads->down + (long)level * hidden * inner,
                     hidden / LANES, NULL, job->sums, hidden, NULL, 0);
        TEAM_DEALT(r, rows)
            for (int i = 0; i < hidden; i += LANES)
                NAME(store16)(states + (long)r * hidden + i, vf_load(job->sums + (long)r * hidden + i) +
                                                                 NAME(load16)(above + (long)follow->from[r] * hidden + i));
        team_end_loop(member);
        NAME(linear)(member, STORE, states, hidden, rows, hidden, heads->draft_lm_head, width / LANES, NULL, job->logits,
                     width, NULL, 0);
        TEAM_DEALT(r, rows) follow_guess(follow, heads, job->logits + (long)r * width, r);
        team_end_loop(member);
        if (member->index == 0) follow_choose(follow, level + 1 < heads->heads);
        team_end_loop(member);
        above = states;
    }
}

static void NAME(copy_slots)(const mg_model *model, const int32_t *from, const int32_t *to, int n) {
    const int head_dim = model->head_dim;
    const long head_size = (long)head_dim * LANES, page_size = model->kv_heads * head_size;
    for (int l = 0; l < model->layers; l++) {
        T *k = (T *)model->k_pool + l * model->pages * page_size, *v = (T *)model->v_pool + l * model->pages * page_size;
        for (int i = 0; i < n; i++)
            for (int h = 0; h < model->kv_heads; h++) {
                const long source = (from[i] / LANES) * page_size + h * head_size;
                const long target = (to[i] / LANES) * page_size + h * head_size;
                NAME(copy_position)(k + target, v + target, to[i] % LANES, k + source, v + source, from[i] % LANES, head_dim);
            }
    }
}
