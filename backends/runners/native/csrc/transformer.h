// One packed forward of a Llama-shaped decoder, and Medusa heads beside it, for one element type. Included twice by
// kernels.c, float first, with
//   T        element type of weights, activations and KV pages (float or bf16)
//   STEP     elements of T that one multiply-add consumes along the reduced dimension (1 or 2)
//   NAME(x)  the symbol's name for this type
//   A        element type of activations where they are multiplied: T, or floats rounded to T (see linear.h)
//
// Formatted by hand: clang-format 14 takes a call NAME(f)(x) for a declaration.
// clang-format off

#if STEP == 2 && !HAS_DOT
#define A float
#else
#define A T
#endif

#include "linear.h"
#include "attention.h"

// x [n] as operands, made in `room` where they are of another type.
static const A *NAME(operands)(mg_member *member, const T *x, long n, void *room) {
#if STEP == 2 && !HAS_DOT
    A *made = room;
    TEAM_DEALT(i, n / LANES) NAME(put16)(made + (long)i * LANES, NAME(load16)(x + (long)i * LANES));
    team_end_loop(member);
    return made;
#else
    (void)member, (void)n, (void)room;
    return x;
#endif
}

// 1 / sqrt(mean(x^2) + eps).
INLINE vf NAME(rms_scale)(const A *x, int size, float eps) {
    vf squares = vf_set(0.0f);
    for (int i = 0; i < size; i += LANES) {
        const vf v = NAME(get16)(x + i);
        squares = vf_fma(v, v, squares);
    }
    return vf_set(1.0f / sqrtf(vf_sum(squares) / size + eps));
}

INLINE vf NAME(normed)(const float *x, vf scale, const float *weight) {
    return vf_mul(vf_mul(vf_load(x), scale), vf_load(weight));
}

INLINE void NAME(rms_norm)(const float *x, const float *weight, int size, float eps, T *out) {
    const vf scale = rms_scale_f32(x, size, eps);
    for (int i = 0; i < size; i += LANES) NAME(store16)(out + i, NAME(normed)(x + i, scale, weight + i));
}

INLINE void NAME(rms_norm_operand)(const float *x, const float *weight, int size, float eps, A *out) {
    const vf scale = rms_scale_f32(x, size, eps);
    for (int i = 0; i < size; i += LANES) NAME(put16)(out + i, NAME(normed)(x + i, scale, weight + i));
}

// In place: optional RMS norm of each head (Qwen 3), then rotary embedding in the half-split convention.
INLINE void NAME(norm_and_rotate)(float *x, const float *norm, const float *cos, const float *sin, int size,
                                  float eps) {
    if (norm) {
        const vf scale = rms_scale_f32(x, size, eps);
        for (int i = 0; i < size; i += LANES) vf_store(x + i, NAME(normed)(x + i, scale, norm + i));
    }
    const int half = size / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vf a = vf_load(x + i), b = vf_load(x + i + half), c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(x + i, vf_fma(a, c, vf_neg(vf_mul(b, s))));
        vf_store(x + i + half, vf_fma(b, c, vf_mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        x[i + half] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

// Norms of all rows into x_norm.
INLINE void NAME(norm_rows)(mg_member *member, const mg_workspace *ws, const float *weight, int rows, int hidden,
                            float eps) {
    A *x_norm = ws->x_norm;
    TEAM_DEALT(row, rows)
        NAME(rms_norm_operand)(ws->residual + (long)row * hidden, weight, hidden, eps, x_norm + (long)row * hidden);
    team_end_loop(member);
}

// Rotary embedding of one row; its query goes to ws->q, its key and value to the row's slot.
static void NAME(place_row)(const mg_model *model, const mg_batch *batch, const mg_layer *layer, const mg_workspace *ws,
                            long layer_offset, int row) {
    const int head_dim = model->head_dim, q_size = model->heads * head_dim, kv_size = model->kv_heads * head_dim;
    float *x = ws->qkv + (long)row * (q_size + 2 * kv_size);
    const float *cos = model->cos + (long)batch->positions[row] * (head_dim / 2);
    const float *sin = model->sin + (long)batch->positions[row] * (head_dim / 2);
    for (int h = 0; h < model->heads; h++)
        NAME(norm_and_rotate)(x + h * head_dim, layer->q_norm, cos, sin, head_dim, model->eps);
    A *q = (A *)ws->q + (long)row * q_size;
    for (int i = 0; i < q_size; i += LANES) NAME(put16)(q + i, vf_load(x + i));
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
            for (int i = 0; i < LANES; i += STEP)
                memcpy(k_page + NAME(key_at)(place, d + i), rounded + i, sizeof(T) * STEP);
            NAME(store16)(rounded, vf_load(v + d));
            for (int i = 0; i < LANES; i++) v_page[NAME(value_at)(place, d + i)] = rounded[i];
        }
    }
}

static void NAME(forward_member)(mg_member *member, void *arguments) {
    const forward_job *job = arguments;
    const mg_model *model = job->model;
    const mg_batch *batch = job->batch;
    mg_workspace *ws = job->ws;
    const int rows = batch->rows, hidden = model->hidden, q_size = model->heads * model->head_dim;
    const int kv_size = model->kv_heads * model->head_dim, qkv_size = q_size + 2 * kv_size;
    const long layer_stride = model->pages * (long)kv_size * LANES;
    char *scratch = ws->scratch + (size_t)member->index * ws->scratch_size;
    TEAM_DEALT(row, rows)
        for (int i = 0; i < hidden; i += LANES)
            vf_store(ws->residual + (long)row * hidden + i,
                     NAME(load16)((const T *)model->embed + (long)batch->tokens[row] * hidden + i));
    team_end_loop(member);
    for (int l = 0; l < model->layers; l++) {
        const mg_layer *layer = model->layer + l;
        const long offset = l * layer_stride;
        NAME(norm_rows)(member, ws, layer->attention_norm, rows, hidden, model->eps);
        NAME(linear)(member, STORE, ws->x_norm, hidden, rows, hidden, layer->qkv, model->is_int8,
                     qkv_size / LANES, layer->qkv_bias, ws->qkv, qkv_size, NULL, 0);
        TEAM_DEALT(row, rows) NAME(place_row)(model, batch, layer, ws, offset, row);
        team_end_loop(member);
        TEAM_CLAIMED(task, job->n_tiles * model->kv_heads) {
            const int32_t *tile = ws->tiles + 2 * (task / model->kv_heads);
            NAME(attend)(model, batch, ws, offset, tile[0], tile[1], task % model->kv_heads, scratch);
        }
        team_end_loop(member);
        NAME(linear)(member, ADD, ws->attention, q_size, rows, q_size, layer->o, model->is_int8,
                     hidden / LANES, NULL, ws->residual, hidden, NULL, 0);
        NAME(norm_rows)(member, ws, layer->mlp_norm, rows, hidden, model->eps);
        NAME(linear)(member, SILU_MUL, ws->x_norm, hidden, rows, hidden, layer->gate_up, model->is_int8,
                     2 * model->intermediate / LANES, NULL, NULL, 0, ws->act, model->intermediate);
        NAME(linear)(member, ADD, ws->act, model->intermediate, rows, model->intermediate, layer->down,
                     model->is_int8, hidden / LANES, NULL, ws->residual, hidden, NULL, 0);
    }
    TEAM_DEALT(i, batch->out_rows)
        NAME(rms_norm)(ws->residual + (long)batch->out_row[i] * hidden, model->final_norm, hidden, model->eps,
                       (T *)job->hidden_out + (long)i * hidden);
    team_end_loop(member);
}

static void NAME(forward)(mg_pool *pool, const mg_model *model, const mg_batch *batch, mg_workspace *ws,
                          void *hidden_out) {
    // Rows of one sequence that share their full pages attend together.
    const int group = model->heads / model->kv_heads;
    const int most = batch->rows < PROMPT_ROWS ? QUERY_ROWS : PROMPT_QUERY_ROWS;
    const int rows_per_tile = group >= most ? 1 : most / group;
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
    forward_job job = {model, batch, ws, n_tiles, hidden_out};
    pool_run(pool, NAME(forward_member), &job);
}

static void NAME(project_member)(mg_member *member, void *arguments) {
    const project_job *job = arguments;
    const A *x = NAME(operands)(member, job->x, (long)job->rows * job->k_size, job->room);
    NAME(linear)(member, STORE, x, job->k_size, job->rows, job->k_size, job->weights, job->is_int8, job->units, NULL,
                 job->out, (long)job->units * LANES, NULL, 0);
}

// Medusa heads: for each head h, state = x + down_h . silu(up_h . x_in + bias_h), then logits over the draft
// vocabulary.
static void NAME(heads_member)(mg_member *member, void *arguments) {
    const heads_job *job = arguments;
    const mg_heads *heads = job->heads;
    const int up = heads->heads * heads->inner, hidden = heads->hidden, n = job->n;
    const T *x = job->x;
    A *act = job->act, *state_t = job->state_t;
    const A *x_in = NAME(operands)(member, job->x_in, (long)n * heads->in_size, job->room);
    NAME(linear)(member, STORE_SILU, x_in, heads->in_size, n, heads->in_size, heads->up, 0, up / LANES,
                 heads->up_bias, NULL, 0, act, up);
    for (int h = 0; h < heads->heads; h++)
        NAME(linear)(member, STORE, act + (long)h * heads->inner, up, n, heads->inner,
                     (const T *)heads->down + (long)h * hidden * heads->inner, 0, hidden / LANES, NULL,
                     job->state + (long)h * n * hidden, hidden, NULL, 0);
    TEAM_DEALT(r, heads->heads * n)
        for (int i = 0; i < hidden; i += LANES)
            NAME(put16)(state_t + (long)r * hidden + i, vf_add(vf_load(job->state + (long)r * hidden + i),
                                                              NAME(load16)(x + (long)(r % n) * hidden + i)));
    team_end_loop(member);
    NAME(linear)(member, STORE, state_t, hidden, heads->heads * n, hidden, heads->draft_lm_head, 0,
                 heads->draft_vocab_padded / LANES, NULL, job->logits, heads->draft_vocab_padded, NULL, 0);
}

// [x / rms(x); e / rms(e)] of a state and an embedding.
INLINE void NAME(block_input)(const A *state, const T *embedding, int size, A *out) {
    for (int i = 0; i < size; i += LANES) NAME(put16)(out + size + i, NAME(load16)(embedding + i));
    const A *halves[2] = {state, out + size};
    for (int half = 0; half < 2; half++) {
        const vf scale = NAME(rms_scale)(halves[half], size, half ? 1e-12f : 1e-6f);
        for (int i = 0; i < size; i += LANES)
            NAME(put16)(out + half * size + i, vf_mul(NAME(get16)(halves[half] + i), scale));
    }
}

// Sequential heads, level by level: the state of a list of guesses comes from the state of the list above it and the
// token chosen from that.
static void NAME(follow_member)(mg_member *member, void *arguments) {
    const follow_job *job = arguments;
    const mg_heads *heads = job->heads;
    mg_follow *follow = job->follow;
    const int hidden = heads->hidden, inner = heads->inner, in_size = heads->in_size, width = heads->draft_vocab_padded;
    const T *given = job->hidden, *embed = heads->embed;
    A *x_in = job->x_in;
    for (int level = 0; level < heads->heads; level++) {
        const int rows = follow->rows;
        A *states = job->states[level % 2], *above = job->states[(level + 1) % 2];
        if (!rows) break;
        if (level == 0) {
            TEAM_DEALT(r, rows)
                for (int i = 0; i < hidden; i += LANES)
                    NAME(put16)(above + (long)r * hidden + i, NAME(load16)(given + (long)follow->from[r] * hidden + i));
            team_end_loop(member);
        }
        TEAM_DEALT(r, rows)
            NAME(block_input)(above + (long)(level ? follow->from[r] : r) * hidden, embed + (long)follow->token[r] * hidden, hidden,
                              x_in + (long)r * in_size);
        team_end_loop(member);
        NAME(linear)(member, STORE_SILU, x_in, in_size, rows, in_size,
                     (const T *)heads->up + (long)level * inner * in_size, 0, inner / LANES,
                     heads->up_bias + (long)level * inner, NULL, 0, job->act, inner);
        NAME(linear)(member, STORE, job->act, inner, rows, inner,
                     (const T *)heads->down + (long)level * hidden * inner, 0, hidden / LANES, NULL, job->sums,
                     hidden, NULL, 0);
        TEAM_DEALT(r, rows)
            for (int i = 0; i < hidden; i += LANES)
                NAME(put16)(states + (long)r * hidden + i,
                            vf_add(vf_load(job->sums + (long)r * hidden + i),
                                   NAME(get16)(above + (long)(level ? follow->from[r] : r) * hidden + i)));
        team_end_loop(member);
        NAME(linear)(member, STORE, states, hidden, rows, hidden, heads->draft_lm_head, 0, width / LANES, NULL,
                     job->logits, width, NULL, 0);
        TEAM_DEALT(r, rows) follow_guess(follow, heads, job->logits + (long)r * width, r);
        team_end_loop(member);
        if (member->index == 0) follow_choose(follow, level + 1 < heads->heads);
        team_end_loop(member);
    }
}

static void NAME(copy_slots)(const mg_model *model, const int32_t *from, const int32_t *to, int n) {
    const int head_dim = model->head_dim;
    const long head_size = (long)head_dim * LANES, page_size = model->kv_heads * head_size;
    for (int l = 0; l < model->layers; l++) {
        const long layer = l * model->pages * page_size;
        T *k = (T *)model->k_pool + layer, *v = (T *)model->v_pool + layer;
        for (int i = 0; i < n; i++)
            for (int h = 0; h < model->kv_heads; h++) {
                const long source = (from[i] / LANES) * page_size + h * head_size;
                const long target = (to[i] / LANES) * page_size + h * head_size;
                NAME(copy_position)(k + target, v + target, to[i] % LANES, k + source, v + source, from[i] % LANES,
                                    head_dim);
            }
    }
}

#undef A
