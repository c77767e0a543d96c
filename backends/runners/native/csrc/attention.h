// Attention over the pages of the cache, for each element type. Included by transformer.h.
//
// Formatted by hand: clang-format 14 takes a call NAME(f)(x) for a declaration.
// clang-format off

// Where element d of one position lies in a page of one KV head.
INLINE int NAME(key_at)(int position, int d) { return (d / STEP) * LANES * STEP + position * STEP + d % STEP; }
INLINE int NAME(value_at)(int position, int d) {
    return (d / LANES) * LANES * LANES + (position / STEP) * LANES * STEP + (d % LANES) * STEP + position % STEP;
}

// The first n positions (n < 16) of a page of one KV head; the rest become zeros.
INLINE void NAME(copy_first)(T *k_to, T *v_to, const T *k_from, const T *v_from, int n, int head_dim) {
    const vi wanted = vi_first(n);
    for (int i = 0; i < head_dim * LANES; i += LANES * STEP) {
        vi_store(k_to + i, vi_and(vi_load(k_from + i), wanted));
        const int left = n - i / LANES % LANES;  // lanes of a line of values are dimensions, its elements positions
        vi_store(v_to + i, vi_and(vi_load(v_from + i), vi_set(left >= STEP ? -1 : left <= 0 ? 0 : 0xffff)));
    }
}

INLINE void NAME(prefetch)(const T *from, long elements) {
    for (long i = 0; i < elements; i += 64 / (long)sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

INLINE void NAME(copy_position)(T *k_to, T *v_to, int to, const T *k_from, const T *v_from, int from, int head_dim) {
    for (int d = 0; d < head_dim; d += STEP)
        memcpy(k_to + NAME(key_at)(to, d), k_from + NAME(key_at)(from, d), sizeof(T) * STEP);
    for (int d = 0; d < head_dim; d++) v_to[NAME(value_at)(to, d)] = v_from[NAME(value_at)(from, d)];
}

// The attention of rows [first, first + count) of a step, which belong to one sequence and share their full pages, for
// one KV head: `queries` = count * group rows of queries. `tail`: the keys of a row that lie in no full page of its own
// path, that is the ragged end of the sequence and the row's candidate ancestors.
typedef struct {
    const mg_batch *batch;
    int first, count, group, queries, head_dim, full;
    int width;                  // floats of a row of scores: LANES for each full page and tail page
    long head_size, page_size;  // elements of a page: of one KV head, of all
    const int32_t *pages;
    const T *k_pool, *v_pool;  // of this layer and KV head
    int tail_pages[PROMPT_QUERY_ROWS];
    // Scratch.
    const T **segments;     // [full]
    float *scores, *out;    // [queries, width], [queries, head_dim]
    A *q, *weights;         // [queries, head_dim], [queries, width]
    T *k_tails, *v_tails;   // [count, TAIL_PAGES, head_size]
    float *norm;            // [queries]: 1 / sum of the weights
} NAME(attention);

INLINE NAME(attention) NAME(attention_of)(const mg_model *model, const mg_batch *batch, const mg_workspace *ws,
                                          long layer_offset, int first, int count, int kv_head, char *scratch) {
    const int group = model->heads / model->kv_heads, head_dim = model->head_dim, full = batch->full_pages[first];
    NAME(attention) a = {
        .batch = batch,
        .first = first,
        .count = count,
        .group = group,
        .queries = count * group,
        .head_dim = head_dim,
        .full = full,
        .width = (full + TAIL_PAGES) * LANES,
        .head_size = (long)head_dim * LANES,
        .page_size = (long)model->kv_heads * head_dim * LANES,
        .pages = batch->pages + batch->page_offsets[batch->sequence[first]],
    };
    const long offset = layer_offset + kv_head * a.head_size;
    a.k_pool = (const T *)model->k_pool + offset;
    a.v_pool = (const T *)model->v_pool + offset;
    const size_t queries = a.queries, width = a.width, tails = (size_t)count * TAIL_PAGES * a.head_size;
    char *next = scratch;
    a.segments = (const T **)next;
    next += sizeof(T *) * (size_t)(full + 1);
    next = (char *)(((uintptr_t)next + 63) & ~(uintptr_t)63);
    a.scores = (float *)next;
    a.out = a.scores + queries * width;
    // Room for floats, whatever A and T are: so the next array begins on a cache line as well.
    a.q = (A *)(a.out + queries * head_dim);
    a.weights = (A *)(a.out + 2 * queries * head_dim);
    a.k_tails = (T *)(a.out + 2 * queries * head_dim + queries * width);
    a.v_tails = a.k_tails + tails;
    a.norm = (float *)(a.v_tails + tails);
    MG_ASSERT((char *)(a.norm + queries) <= scratch + ws->scratch_size);
    const A *q = (const A *)ws->q + ((long)first * model->heads + (long)kv_head * group) * head_dim;
    for (int r = 0; r < count; r++)
        memcpy(a.q + (long)r * group * head_dim, q + (long)r * model->heads * head_dim,
               sizeof(A) * (size_t)group * head_dim);
    return a;
}

// Where the slot's page begins in k_pool and v_pool.
INLINE long NAME(page_of)(const NAME(attention) *a, int32_t slot) { return slot / LANES * a->page_size; }

// The last page of the sequence, which `gather` will read.
INLINE void NAME(prefetch_tails)(const NAME(attention) *a) {
    for (int row = a->first; row < a->first + a->count; row++) {
        const int32_t *offsets = a->batch->tail_offsets + row;
        if (offsets[0] == offsets[1]) continue;
        const long page = NAME(page_of)(a, a->batch->tail_slots[offsets[0]]);
        NAME(prefetch)(a->k_pool + page, a->head_size);
        NAME(prefetch)(a->v_pool + page, a->head_size);
    }
}

// Scores of the keys in full pages. Pages are walked by *absolute* position.
INLINE void NAME(score_pages)(const NAME(attention) *a) {
    const int full = a->full;
    const int32_t *pages = a->pages;
    // Pages lie anywhere, so no hardware looks ahead for the next one.
    for (int p = 0; p < full && p < PAGES_AHEAD; p++)
        NAME(prefetch)(a->k_pool + pages[p] * a->page_size, a->head_size);
    for (int p = 0; p < full;) {
        // Neighbours in the pool are multiplied together: more chains at once.
        int n = 1;
        while (n < 4 && p + n < full && pages[p + n] == pages[p] + n) n++;
        if (n == 3) n = 2;
        for (int ahead = p; ahead < p + n; ahead++) {
            if (ahead + PAGES_AHEAD < full)
                NAME(prefetch)(a->k_pool + pages[ahead + PAGES_AHEAD] * a->page_size, a->head_size);
            NAME(prefetch)(a->v_pool + pages[ahead] * a->page_size, a->head_size);
        }
        const T *page = a->k_pool + pages[p] * a->page_size;
        NAME(multiply)(a->queries, n, &page, 1, a->page_size, a->head_dim / STEP, a->q, a->head_dim,
                       a->scores + p * LANES, a->width, 0);
        p += n;
    }
}

// The keys and values of each row's tail, put into pages in the order of its path.
INLINE void NAME(gather)(NAME(attention) *a) {
    const long head_size = a->head_size;
    for (int r = 0; r < a->count; r++) {
        const int32_t *offsets = a->batch->tail_offsets + a->first + r, *slots = a->batch->tail_slots + offsets[0];
        const int n = offsets[1] - offsets[0];
        const long tail = (long)r * TAIL_PAGES * head_size;
        T *k_tail = a->k_tails + tail, *v_tail = a->v_tails + tail;
        a->tail_pages[r] = (n + LANES - 1) / LANES;
        MG_ASSERT(a->tail_pages[r] <= TAIL_PAGES);
        if (n == 0) continue;
        // What the rows of a sequence share lies in its last page as it should; the row's own path is put behind it.
        int shared = 0;
        while (shared < n && shared < LANES && slots[shared] == slots[0] + shared && slots[shared] % LANES == shared)
            shared++;
        const long first_page = NAME(page_of)(a, slots[0]);
        NAME(copy_first)(k_tail, v_tail, a->k_pool + first_page, a->v_pool + first_page, shared, a->head_dim);
        if (a->tail_pages[r] > 1) {
            memset(k_tail + head_size, 0, sizeof(T) * head_size);
            memset(v_tail + head_size, 0, sizeof(T) * head_size);
        }
        for (int i = shared; i < n; i++) {
            const long from = NAME(page_of)(a, slots[i]), to = i / LANES * head_size;
            NAME(copy_position)(k_tail + to, v_tail + to, i % LANES, a->k_pool + from, a->v_pool + from,
                                slots[i] % LANES, a->head_dim);
        }
    }
}

// Scores of the gathered keys; the places behind a row's last key get one that no weight comes from.
INLINE void NAME(score_tails)(const NAME(attention) *a) {
    for (int r = 0; r < a->count; r++) {
        const int32_t *offsets = a->batch->tail_offsets + a->first + r;
        const int n = offsets[1] - offsets[0], m = r * a->group;
        for (int p = 0; p < a->tail_pages[r]; p++) {
            const T *page = a->k_tails + ((long)r * TAIL_PAGES + p) *a->head_size;
            float *scores = a->scores + (long)m * a->width + (a->full + p) * LANES;
            NAME(multiply)(a->group, 1, &page, 1, 0, a->head_dim / STEP, a->q + m * a->head_dim, a->head_dim, scores,
                           a->width, 0);
            for (int j = 0; j < a->group; j++)
                for (int i = n - p * LANES; i < LANES; i++) scores[(long)j * a->width + i] = NO_SCORE;
        }
    }
}

// weights = exp(scale * (score - the highest)); norm = 1 / their sum.
INLINE void NAME(softmax)(const NAME(attention) *a, float scale_by) {
    const vf scale = vf_set(scale_by);
    for (int m = 0; m < a->queries; m++) {
        const int used = a->full + a->tail_pages[m / a->group];
        const float *scores = a->scores + (long)m * a->width;
        vf top = vf_set(NO_SCORE);
        for (int p = 0; p < used; p++) top = vf_max(top, vf_load(scores + p * LANES));
        const vf lowest = vf_set(-(vf_hmax(top) * scale_by));
        vf sum = vf_set(0.0f);
        for (int p = 0; p < used; p++) {
            const vf weight = vf_exp(vf_fma(vf_load(scores + p * LANES), scale, lowest));
            sum = vf_add(sum, weight);
            NAME(put16)(a->weights + (long)m * a->width + p * LANES, weight);
        }
        a->norm[m] = 1.0f / vf_sum(sum);
    }
}

// out = the values, each times its weight: those in full pages first, then the row's tail.
INLINE void NAME(weigh)(const NAME(attention) *a) {
    for (int p = 0; p < a->full; p++) a->segments[p] = a->v_pool + a->pages[p] * a->page_size;
    const int d_units = a->head_dim / LANES;
    NAME(multiply)(a->queries, d_units, a->segments, a->full, LANES * LANES, LANES / STEP, a->weights, a->width, a->out,
                   a->head_dim, 0);
    for (int r = 0; r < a->count; r++)
        for (int p = 0; p < a->tail_pages[r]; p++) {
            const T *page = a->v_tails + ((long)r * TAIL_PAGES + p) *a->head_size;
            const int m = r * a->group;
            NAME(multiply)(a->group, d_units, &page, 1, LANES * LANES, LANES / STEP,
                           a->weights + (long)m * a->width + (a->full + p) * LANES, a->width,
                           a->out + (long)m * a->head_dim, a->head_dim, 1);
        }
}

// Into ws->attention. Scores of full pages come first: meanwhile the tails' pages arrive in the cache.
static void NAME(attend)(const mg_model *model, const mg_batch *batch, mg_workspace *ws, long layer_offset, int first,
                         int count, int kv_head, char *scratch) {
    NAME(attention) a = NAME(attention_of)(model, batch, ws, layer_offset, first, count, kv_head, scratch);
    NAME(prefetch_tails)(&a);
    NAME(score_pages)(&a);
    NAME(gather)(&a);
    NAME(score_tails)(&a);
    NAME(softmax)(&a, model->scale);
    NAME(weigh)(&a);
    for (int m = 0; m < a.queries; m++) {
        const long row = first + m / a.group, head = kv_head * a.group + m % a.group;
        A *target = (A *)ws->attention + (row * model->heads + head) *a.head_dim;
        for (int d = 0; d < a.head_dim; d += LANES)
            NAME(put16)(target + d, vf_mul(vf_load(a.out + (long)m * a.head_dim + d), vf_set(a.norm[m])));
    }
}
