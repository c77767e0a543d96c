// CPU kernels of the decoding engine; plain C, called through ctypes. Compiled once for each variant (see variants.c),
// with MG_VARIANT as its name.
#include <float.h>
#include <stdlib.h>

#include "names.h"
#include "simd.h"
#include "thread_pool.h"

// Weights are packed as linear.h has them, or, with is_int8, as weights8.h has.
typedef struct {
    const void *qkv, *o, *gate_up, *down;
    const float *attention_norm, *mlp_norm, *qkv_bias, *q_norm, *k_norm;
} mg_layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, is_bf16, is_int8, vocab, max_context;
    float eps, scale;
    int64_t pages;
    const mg_layer *layer;
    const void *embed;
    const float *final_norm, *cos, *sin;
    void *k_pool, *v_pool;
} mg_model;

// One step's rows. slots: where a row's key and value go (page * 16 + offset). full_pages: how many leading pages of
// the sequence a row sees whole; its remaining keys are tail_slots[tail_offsets[row] : tail_offsets[row + 1]], in
// order of position (at most MAX_TAIL, the row itself last). Rows of one sequence are adjacent.
typedef struct {
    int32_t rows, out_rows;
    const int32_t *tokens, *positions, *slots, *sequence, *full_pages, *tail_offsets, *tail_slots;
    const int32_t *page_offsets, *pages, *out_row;
} mg_batch;

// A layer in eight bits (int8.h): packed weights, and the scale of each output column.
typedef struct {
    const uint8_t *weights;
    const float *scale;
} mg_int8;

// With is_int8, the layers are up8, down8 and draft_lm_head8; the other three are not set.
typedef struct {
    int32_t heads, hidden, inner, in_size, draft_vocab_padded, draft_vocab, vocab, is_bf16, is_int8;
    const void *up, *down, *draft_lm_head, *embed;
    const float *up_bias;
    const int32_t *draft_ids;
    mg_int8 up8, down8, draft_lm_head8;
} mg_heads;

// Lists of guesses of n sequences, `lists` for each at most, k guesses in a list; arrays [n, lists, k]. List 0 follows
// the pending token. A sequence with planned > 0 has its lists named: list i follows guess plan_rank[i] of list
// plan_above[i] (ascending in level); planned may be NULL. Otherwise the `width` likeliest guesses of each level are
// followed, as far as their survival reaches `least`. Rows are the lists of the present level.
typedef struct {
    int32_t n, lists, k, width;
    float least;
    int32_t rows, levels;  // levels: that have run
    const int32_t *row, *pending, *planned, *plan_above, *plan_rank;  // row [n]: of the states in `hidden`
    int32_t *tokens, *below;  // below [n, lists, k]: -1 for none
    float *probabilities, *survival;  // survival [n, lists]
    int32_t *count, *first;  // [n]: lists in use; first list of the present level
    int32_t *from, *token, *list;  // of each row: row of the state above, token chosen, list (of all n * lists)
} mg_follow;

enum { MAX_WIDTH = 8, PAGES_AHEAD = 6 };

typedef struct {
    void *x_norm, *q, *attention, *act;
    float *residual, *qkv;
    int32_t *tiles;
    char *scratch;  // scratch_size bytes for each thread
    size_t scratch_size;
    int max_rows;
} mg_workspace;

#include "checks.h"

static void *aligned(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

#include "sampling.h"
#include "follow.h"

// What a linear layer does with its products; see linear() in linear.h.
typedef enum { STORE, ADD, SILU_MUL, STORE_SILU } mg_epilogue;

typedef struct {
    const mg_model *model;
    const mg_batch *batch;
    mg_workspace *ws;
    int n_tiles;
    void *hidden_out;
} forward_job;

typedef struct {
    const void *x, *weights;
    int is_int8, rows, k_size, units;
    float *out;
    void *room;  // for x as operands
} project_job;

// x_in [n, in_size]: what the heads' first layer is fed; x [n, hidden]; the others [heads, n, ...].
typedef struct {
    const mg_heads *heads;
    const void *x_in, *x;
    int n;
    void *act, *state_t, *room;
    float *state, *logits;
} heads_job;

// hidden: the states that level 0 starts from. The others are of the rows of a level; states: of this level and the
// last.
typedef struct {
    const mg_heads *heads;
    mg_follow *follow;
    const void *hidden;
    void *x_in, *act, *states[2];
    float *sums, *logits;
} follow_job;

INLINE int smaller(int a, int b) { return a < b ? a : b; }

// Bytes of a unit in eight bits along k_size.
INLINE long size8(int k_size) { return (long)k_size * LANES + (k_size + GROUP8 - 1) / GROUP8 * 64L; }

#define T float
#define STEP 1
#define NAME(x) x##_f32
#include "transformer.h"
#undef T
#undef STEP
#undef NAME
#define T bf16
#define STEP 2
#define NAME(x) x##_bf16
#include "transformer.h"
#include "int8.h"

void mg_workspace_free(mg_workspace *ws) {
    if (!ws) return;
    free(ws->x_norm);
    free(ws->q);
    free(ws->attention);
    free(ws->act);
    free(ws->residual);
    free(ws->qkv);
    free(ws->tiles);
    free(ws->scratch);
    free(ws);
}

// NULL when the model can be run.
const char *mg_model_fault(const mg_model *model, int max_rows, int threads) {
    return check_model(model, max_rows, threads);
}

// For a model without a fault. NULL when out of memory.
mg_workspace *mg_workspace_new(const mg_model *model, int max_rows, int threads) {
    mg_workspace *ws = calloc(1, sizeof *ws);
    if (!ws) return NULL;
    ws->max_rows = max_rows;
    const size_t rows = max_rows, q_size = (size_t)model->heads * model->head_dim;
    const size_t qkv_size = q_size + 2 * (size_t)model->kv_heads * model->head_dim;
    const int group = model->heads / model->kv_heads;
    const size_t tile_rows = group >= PROMPT_QUERY_ROWS ? 1 : PROMPT_QUERY_ROWS / group, tile_m = tile_rows * group;
    const size_t width = (size_t)model->max_context + (1 + TAIL_PAGES) * LANES;
    ws->x_norm = aligned(rows * model->hidden * 4);
    ws->q = aligned(rows * q_size * 4);
    ws->attention = aligned(rows * q_size * 4);
    ws->act = aligned(rows * model->intermediate * 4);
    ws->residual = aligned(rows * model->hidden * 4);
    ws->qkv = aligned(rows * qkv_size * 4);
    ws->tiles = aligned(rows * 2 * sizeof(int32_t));
    ws->scratch_size = sizeof(void *) * (width / LANES + 2) + 64 + 2 * 4 * tile_m * width +
                       2 * 4 * tile_m * model->head_dim + 2 * TAIL_PAGES * 4 * tile_rows * LANES * model->head_dim +
                       4 * tile_m + 4096;
    ws->scratch_size = (ws->scratch_size + 4095) / 4096 * 4096;
    ws->scratch = aligned(ws->scratch_size * threads);
    if (!ws->x_norm || !ws->q || !ws->attention || !ws->act || !ws->residual || !ws->qkv || !ws->tiles ||
        !ws->scratch) {
        mg_workspace_free(ws);
        return NULL;
    }
    return ws;
}

// memory: the arrays of a step one behind the other; ends: where each of them ends. hidden_out [out_rows, hidden]:
// final-norm hidden states of the rows named by out_row. NULL, or what is wrong with the arrays.
const char *mg_forward(mg_pool *pool, const mg_model *model, const int32_t *memory, const int32_t *ends,
                       mg_workspace *ws, void *hidden_out) {
    mg_batch batch;
    const char *fault = check_batch(model, ws->max_rows, memory, ends, &batch);
    if (fault) return fault;
    if (model->is_bf16)
        forward_bf16(pool, model, &batch, ws, hidden_out);
    else
        forward_f32(pool, model, &batch, ws, hidden_out);
    return NULL;
}

// out [rows, units * 16] float32 = x [rows, k_size] times packed weights (is_int8: as weights8.h has them). NULL, or
// what is wrong.
const char *mg_project(mg_pool *pool, int is_bf16, int is_int8, const void *x, int rows, int k_size,
                       const void *weights, int units, float *out) {
    void *room = aligned(sizeof(float) * rows * k_size);
    if (!room) return NO_MEMORY;
    project_job job = {x, weights, is_int8, rows, k_size, units, out, room};
    pool_run(pool, is_bf16 ? project_member_bf16 : project_member_f32, &job);
    free(room);
    return NULL;
}

// Keys and values of slots `from` are copied to slots `to`, in every layer. NULL, or what is wrong.
const char *mg_copy_slots(const mg_model *model, const int32_t *from, const int32_t *to, int n) {
    const char *fault = check_slots(model, from, to, n);
    if (fault) return fault;
    if (model->is_bf16)
        copy_slots_bf16(model, from, to, n);
    else
        copy_slots_f32(model, from, to, n);
    return NULL;
}

// logits [heads * n, draft_vocab_padded] float32, head-major. NULL, or what is wrong.
const char *mg_heads_logits(mg_pool *pool, const mg_heads *heads, const void *x_in, const void *x, int n,
                            float *logits) {
    const size_t rows = (size_t)heads->heads * n;
    void *act = aligned(rows * heads->inner * 4), *state_t = aligned(rows * heads->hidden * 4);
    void *room = aligned((size_t)n * heads->in_size * 4);
    float *state = aligned(rows * heads->hidden * 4);
    const int failed = !act || !state || !state_t || !room;
    if (!failed) {
        heads_job job = {heads, x_in, x, n, act, state_t, room, state, logits};
        pool_run(pool, heads->is_bf16 ? heads_member_bf16 : heads_member_f32, &job);
    }
    free(act);
    free(state);
    free(state_t);
    free(room);
    return failed ? NO_MEMORY : NULL;
}

static const char *follow_int8(mg_pool *pool, const mg_heads *heads, mg_follow *follow, const void *hidden,
                               size_t rows) {
    const size_t floats[] = {heads->in_size, heads->inner, heads->hidden, heads->hidden, heads->draft_vocab_padded};
    const size_t bytes[] = {heads->in_size, heads->inner, heads->hidden};
    size_t size = 0;
    for (int i = 0; i < 5; i++) size += rows * floats[i] * sizeof(float);
    for (int i = 0; i < 3; i++) size += rows * (bytes[i] + (int8_groups(bytes[i]) + 1) * sizeof(float));
    void *memory = aligned(size);
    if (!memory) return NO_MEMORY;
    float *part[5], *next = memory;
    for (int i = 0; i < 5; i++, next += rows * floats[i - 1]) part[i] = next;
    int8_rows quantised[3];
    for (int i = 0; i < 3; i++) {
        const int groups = int8_groups(bytes[i]);
        quantised[i] = (int8_rows){NULL, next, next + rows * groups, groups};
        next += rows * (groups + 1);
    }
    int8_t *x = (int8_t *)next;
    for (int i = 0; i < 3; i++, x += rows * bytes[i - 1]) quantised[i].x = x;
    follow_int8_job job = {heads,   follow,       hidden,       part[0],     part[1], {part[2], part[3]},
                           part[4], quantised[0], quantised[1], quantised[2]};
    pool_run(pool, follow_int8_member, &job);
    free(memory);
    return NULL;
}

// Guesses of sequential heads from states hidden [hidden_rows, hidden]; max_rows: of a level. What `follow` points to,
// but for rows, pending tokens and plans, is written here. NULL, or what is wrong.
const char *mg_heads_follow(mg_pool *pool, const mg_heads *heads, mg_follow *follow, const void *hidden,
                            int hidden_rows, int max_rows) {
    const char *fault = check_follow(heads, follow, hidden_rows, max_rows);
    if (fault) return fault;
    const size_t rows = max_rows;
    follow_begin(follow);
    if (heads->is_int8) return follow_int8(pool, heads, follow, hidden, rows);
    void *x_in = aligned(rows * heads->in_size * 4), *act = aligned(rows * heads->inner * 4);
    void *one = aligned(rows * heads->hidden * 4), *other = aligned(rows * heads->hidden * 4);
    float *sums = aligned(rows * heads->hidden * 4), *logits = aligned(rows * heads->draft_vocab_padded * 4);
    const int failed = !x_in || !act || !one || !other || !sums || !logits;
    if (!failed) {
        follow_job job = {heads, follow, hidden, x_in, act, {one, other}, sums, logits};
        pool_run(pool, heads->is_bf16 ? follow_member_bf16 : follow_member_f32, &job);
    }
    free(x_in);
    free(act);
    free(one);
    free(other);
    free(sums);
    free(logits);
    return failed ? NO_MEMORY : NULL;
}

// For each of the named rows of logits [logit_rows, n], the lowest index that holds its maximum; -1 where that is not
// finite. NULL, or what is wrong.
const char *mg_argmax(mg_pool *pool, const float *logits, int logit_rows, int64_t stride, int n,
                      const int32_t *row_index, int rows, int32_t *out) {
    const char *fault = check_rows(row_index, rows, logit_rows, n);
    if (fault) return fault;
    rank_job job = {.logits = logits, .row_index = row_index, .rows = rows, .n = n, .stride = stride, .ids = out};
    pool_run(pool, argmax_member, &job);
    return NULL;
}

// The k best of each row with their softmax probabilities, best first (ties: lower index first). NULL, or what is
// wrong.
const char *mg_top_k(mg_pool *pool, const float *logits, int rows, int64_t stride, int n, int k, int32_t *ids,
                     float *probabilities) {
    if (k < 1 || k > MAX_RANKS || k > n) return "k must be from 1 to 32, and at most the columns";
    rank_job job = {
        .logits = logits, .rows = rows, .n = n, .k = k, .stride = stride, .ids = ids, .probabilities = probabilities};
    pool_run(pool, top_k_member, &job);
    return NULL;
}

// One draw from each of the named rows of logits [logit_rows, n]; the parameters are arrays of one value per draw. -1
// where no token can be drawn. NULL, or what is wrong.
const char *mg_sample(mg_pool *pool, const float *logits, int logit_rows, int64_t stride, int n,
                      const int32_t *row_index, int rows, const float *temperature, const int32_t *top_k,
                      const float *top_p, const float *min_p, const double *u, int32_t *out) {
    const char *fault = check_rows(row_index, rows, logit_rows, n);
    if (fault) return fault;
    sample_job job = {logits, row_index, rows, n, stride, temperature, top_k, top_p, min_p, u, out, 0};
    pool_run(pool, sample_member, &job);
    return atomic_load(&job.failed) ? NO_MEMORY : NULL;
}
