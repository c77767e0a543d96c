// What callers may ask of the kernels: limits, the check of a step's arrays, and the table by which Python compares its
// own picture of the structures with ours. A check gives NULL, or a sentence that says what is wrong.
//
// Included by kernels.c behind its structures. With -DMG_CHECKED (`make test-sanitize`), MG_ASSERT also looks at what
// the kernels compute from checked arguments.
#pragma once
#include <stddef.h>

// As in backends/tree.py. A row sees whole pages first, then at most a page without its last position and a path of
// MAX_DEPTH candidates: TAIL_PAGES pages of scratch.
enum { MAX_RANKS = 32, MAX_DEPTH = 16, MAX_TAIL = LANES - 1 + MAX_DEPTH, TAIL_PAGES = 2 };

// Query rows that attend together: in steps of few rows, so that all threads have some; in prompts, as many as share
// their keys. Rows whose sums a linear layer holds at a time.
enum { QUERY_ROWS = 12, PROMPT_QUERY_ROWS = 48, PROMPT_ROWS = 64, ROW_BLOCK = 96 };

// Lines of 64 bytes: in a block along K, a small part of a first cache; from one that is read to one that is asked for.
enum { LINE_BLOCK = 64, LINES_AHEAD = 64 };

// Weights in eight bits (weights8.h): elements along K that share a scale, and of a block along K; bytes from one that
// is read to one that is asked for.
enum { GROUP8 = 64, PANEL8 = 2 * GROUP8, BYTES_AHEAD8 = 4096 };

// A score whose weight is 0 beside any other, finite so that no difference of two is NaN.
#define NO_SCORE (-1e30f)

_Static_assert(LANES == 16, "pages and units have 16 columns");
_Static_assert(MAX_TAIL <= TAIL_PAGES * LANES, "a row's tail must fit its scratch pages");
_Static_assert(sizeof(int) == 4 && sizeof(float) == 4 && sizeof(long) == 8, "index arithmetic is done in 64 bits");
_Static_assert((int)MAX_WIDTH <= (int)MAX_RANKS, "a level follows no more guesses than a list can hold");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "barriers spin on atomic integers");
_Static_assert(TEAM_COUNTERS >= 3, "the counter two loops ahead must not be one in use");
_Static_assert(sizeof(vf) == LANES * sizeof(float) && sizeof(vi) == sizeof(vf), "vectors have 16 lanes");

#ifdef MG_CHECKED
#include <stdio.h>
#define MG_ASSERT(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: kernels: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)
#else
#define MG_ASSERT(condition) ((void)0)
#endif

static const char NO_MEMORY[] = "no memory for the kernels";

// Whether all n values lie in [0, limit).
static int all_below(const int32_t *values, long n, int64_t limit) {
    int good = 1;
    for (long i = 0; i < n; i++) good &= values[i] >= 0 && values[i] < limit;
    return good;
}

// Whether offsets [n + 1] start at 0, do not descend, and end at `end`.
static int is_offsets(const int32_t *offsets, long n, long end) {
    int good = offsets[0] == 0 && offsets[n] == end;
    for (long i = 0; i < n; i++) good &= offsets[i] <= offsets[i + 1];
    return good;
}

// `ends`: where each of the step's arrays ends in `memory`, in the order of mg_batch. Sets `batch`.
static const char *check_batch(const mg_model *model, int max_rows, const int32_t *memory, const int32_t *ends,
                               mg_batch *batch) {
    for (int i = 0; i < 9; i++)
        if (ends[i] < 0 || ends[i + 1] < ends[i]) return "ends descend";
    const int rows = ends[0], sequences = ends[7] - ends[6] - 1, tails = ends[6] - ends[5], pages = ends[8] - ends[7];
    const int outputs = ends[9] - ends[8];
    for (int i = 0; i < 4; i++)
        if (ends[i + 1] - ends[i] != rows) return "tokens, positions, slots, sequence and full_pages differ in length";
    if (ends[5] - ends[4] != rows + 1 || sequences < 0) return "tail_offsets or page_offsets have another length";
    if (rows > max_rows || outputs > max_rows) return "more rows in a step than the runner was made for";
    // clang-format off
    *batch = (mg_batch){rows, outputs, memory, memory + ends[0], memory + ends[1], memory + ends[2], memory + ends[3],
                        memory + ends[4], memory + ends[5], memory + ends[6], memory + ends[7], memory + ends[8]};
    // clang-format on
    const int64_t slots = model->pages * LANES;
    if (!all_below(batch->tokens, rows, model->vocab)) return "tokens holds an id outside the vocabulary";
    if (!all_below(batch->positions, rows, model->max_context)) return "positions holds one outside the context";
    if (!all_below(batch->slots, rows, slots)) return "slots holds one outside the cache";
    if (!all_below(batch->tail_slots, tails, slots)) return "tail_slots holds one outside the cache";
    if (!all_below(batch->pages, pages, model->pages)) return "pages holds one outside the cache";
    if (!all_below(batch->sequence, rows, sequences)) return "sequence holds one that has no pages";
    if (!all_below(batch->out_row, outputs, rows)) return "out_row holds one that is not in the step";
    if (!is_offsets(batch->tail_offsets, rows, tails)) return "tail_offsets do not ascend";
    if (!is_offsets(batch->page_offsets, sequences, pages)) return "page_offsets do not ascend";
    for (int row = 0; row < rows; row++) {
        const int32_t *offsets = batch->page_offsets + batch->sequence[row];
        const int full = batch->full_pages[row], tail = batch->tail_offsets[row + 1] - batch->tail_offsets[row];
        if (full < 0 || full > offsets[1] - offsets[0] || full > model->max_context / LANES)
            return "full_pages holds more than the sequence's pages";
        if (tail > MAX_TAIL)
            return "a row sees more than 31 keys behind its full pages: its path is deeper than 16 levels";
        if (full + tail == 0) return "a row sees no key, not even its own";
    }
    return NULL;
}

// What follow_begin and follow_choose go by. `hidden_rows`: of the states that are given.
static const char *check_follow(const mg_heads *heads, const mg_follow *follow, int hidden_rows, int max_rows) {
    const int lists = follow->lists, k = follow->k, most = follow->n ? max_rows / follow->n : 0;
    if (follow->n < 1 || max_rows % follow->n) return "rows of a level must be as many for each sequence";
    if (k < 1 || k > MAX_RANKS || k > heads->draft_vocab)
        return "k must be from 1 to 32, and within the draft vocabulary";
    if (follow->width < 1 || follow->width > MAX_WIDTH || follow->width > most) return "width is out of bounds";
    if (lists < 1 + (heads->heads - 1) * follow->width) return "too few lists for the heads";
    if (!all_below(follow->row, follow->n, hidden_rows)) return "a row of the hidden states does not exist";
    if (!all_below(follow->pending, follow->n, heads->vocab)) return "a pending token is outside the vocabulary";
    if (!follow->planned) return NULL;
    for (int s = 0; s < follow->n; s++) {
        const int32_t *above = follow->plan_above + (long)s * lists, *rank = follow->plan_rank + (long)s * lists;
        const int planned = follow->planned[s];
        if (planned < 0 || planned > lists) return "a plan has more lists than there is room for";
        // Lists ascend in level: a level ends where a list follows one of the level itself.
        for (int i = 1, first = 1; i < planned; i++) {
            if (above[i] < 0 || above[i] >= i || (i > 1 && above[i] < above[i - 1]) || rank[i] < 0 || rank[i] >= k)
                return "a plan's list follows none of the lists above it";
            if (above[i] >= first) first = i;
            if (i - first + 1 > most) return "a level of a plan has more lists than there are rows";
        }
    }
    return NULL;
}

static const char *check_slots(const mg_model *model, const int32_t *from, const int32_t *to, int n) {
    const int64_t slots = model->pages * LANES;
    return all_below(from, n, slots) && all_below(to, n, slots) ? NULL : "a slot to copy is outside the cache";
}

static const char *check_rows(const int32_t *row_index, int rows, int logit_rows, int n) {
    if (n < 1) return "logits have no columns";
    return all_below(row_index, rows, logit_rows) ? NULL : "a row of the logits does not exist";
}

static const char *check_model(const mg_model *model, int max_rows, int threads) {
    if (model->heads < 1 || model->kv_heads < 1 || model->heads % model->kv_heads)
        return "query heads must be a multiple of key heads";
    if (model->hidden % LANES || model->head_dim % LANES || model->intermediate % LANES)
        return "hidden, intermediate and head sizes must be multiples of 16";
    if (model->pages < 1 || model->pages > INT32_MAX / LANES)
        return "the cache has no page, or more slots than 32 bits count";
    return max_rows < 1 || threads < 1 || model->max_context < 1 ? "rows, threads and context must be positive" : NULL;
}

// A field of a structure, a structure as a whole (field ""), or a limit (structure ""; its value is the offset).
typedef struct {
    const char *structure, *field;
    int64_t offset, size;
} mg_entry;

// clang-format off
#define WHOLE(S) {#S, "", 0, sizeof(S)}
#define FIELD(S, F) {#S, #F, offsetof(S, F), sizeof(((S *)NULL)->F)}
#define LIMIT(L) {"", #L, L, 0}

static const mg_entry LAYOUT[] = {
    WHOLE(mg_layer), FIELD(mg_layer, qkv), FIELD(mg_layer, o), FIELD(mg_layer, gate_up), FIELD(mg_layer, down),
    FIELD(mg_layer, attention_norm), FIELD(mg_layer, mlp_norm), FIELD(mg_layer, qkv_bias), FIELD(mg_layer, q_norm),
    FIELD(mg_layer, k_norm),
    WHOLE(mg_model), FIELD(mg_model, layers), FIELD(mg_model, hidden), FIELD(mg_model, heads),
    FIELD(mg_model, kv_heads),
    FIELD(mg_model, head_dim), FIELD(mg_model, intermediate), FIELD(mg_model, is_bf16), FIELD(mg_model, is_int8),
    FIELD(mg_model, vocab),
    FIELD(mg_model, max_context), FIELD(mg_model, eps), FIELD(mg_model, scale), FIELD(mg_model, pages),
    FIELD(mg_model, layer), FIELD(mg_model, embed), FIELD(mg_model, final_norm), FIELD(mg_model, cos),
    FIELD(mg_model, sin), FIELD(mg_model, k_pool), FIELD(mg_model, v_pool),
    WHOLE(mg_int8), FIELD(mg_int8, weights), FIELD(mg_int8, scale),
    WHOLE(mg_heads), FIELD(mg_heads, heads), FIELD(mg_heads, hidden), FIELD(mg_heads, inner), FIELD(mg_heads, in_size),
    FIELD(mg_heads, draft_vocab_padded), FIELD(mg_heads, draft_vocab), FIELD(mg_heads, vocab), FIELD(mg_heads, is_bf16),
    FIELD(mg_heads, is_int8), FIELD(mg_heads, up), FIELD(mg_heads, down), FIELD(mg_heads, draft_lm_head),
    FIELD(mg_heads, embed), FIELD(mg_heads, up_bias), FIELD(mg_heads, draft_ids), FIELD(mg_heads, up8),
    FIELD(mg_heads, down8), FIELD(mg_heads, draft_lm_head8),
    WHOLE(mg_follow), FIELD(mg_follow, n), FIELD(mg_follow, lists), FIELD(mg_follow, k), FIELD(mg_follow, width),
    FIELD(mg_follow, least), FIELD(mg_follow, rows), FIELD(mg_follow, levels), FIELD(mg_follow, row),
    FIELD(mg_follow, pending), FIELD(mg_follow, planned), FIELD(mg_follow, plan_above), FIELD(mg_follow, plan_rank),
    FIELD(mg_follow, tokens), FIELD(mg_follow, below), FIELD(mg_follow, probabilities), FIELD(mg_follow, survival),
    FIELD(mg_follow, count), FIELD(mg_follow, first), FIELD(mg_follow, from), FIELD(mg_follow, token),
    FIELD(mg_follow, list),
    LIMIT(LANES), LIMIT(MAX_RANKS), LIMIT(MAX_DEPTH), LIMIT(GROUP8),
    {NULL, NULL, 0, 0},
};
// clang-format on

// Ends with an entry without names. bindings.py compares it with its own at load.
const mg_entry *mg_layout(void) { return LAYOUT; }
