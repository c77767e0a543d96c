// Single functions of the kernels, made callable for tests/backends/runners/test_kernel_units.py.
#include "kernels.c"

typedef struct {
    mg_epilogue epilogue;
    const void *x, *weights;
    long ldx, lda;
    int rows, k_size, units;
    const float *bias;
    float *out;
    void *act;
} linear_job;

static void linear_member_bf16(mg_member *member, void *arguments) {
    const linear_job *job = arguments;
    linear_bf16(member, job->epilogue, job->x, job->ldx, job->rows, job->k_size, job->weights, job->units, job->bias,
                job->out, (long)job->units * LANES, job->act, job->lda);
}

static void linear_member_f32(mg_member *member, void *arguments) {
    const linear_job *job = arguments;
    linear_f32(member, job->epilogue, job->x, job->ldx, job->rows, job->k_size, job->weights, job->units, job->bias,
               job->out, (long)job->units * LANES, job->act, job->lda);
}

void unit_linear(mg_pool *pool, int is_bf16, int epilogue, const void *x, long ldx, int rows, int k_size,
                 const void *weights, int units, const float *bias, float *out, void *act, long lda) {
    linear_job job = {epilogue, x, weights, ldx, lda, rows, k_size, units, bias, out, act};
    pool_run(pool, is_bf16 ? linear_member_bf16 : linear_member_f32, &job);
}

typedef struct {
    const mg_int8 *layer;
    const float *x, *bias;
    int rows, k_size, units, silu;
    int8_rows quantised;
    float *out;
} int8_job;

static void int8_member(mg_member *member, void *arguments) {
    int8_job *job = arguments;
    TEAM_DEALT(r, job->rows) int8_quantise(job->x + (long)r * job->k_size, job->k_size, &job->quantised, r);
    team_end_loop(member);
    int8_linear(member, &job->quantised, job->rows, job->k_size, job->layer, 0, job->units, job->bias, job->silu,
                job->out);
}

// q [rows, k_size], scale [rows, groups], sum [rows]: of the activations, as quantised.
void unit_int8_linear(mg_pool *pool, const float *x, int rows, int k_size, const uint8_t *weights,
                      const float *column_scale, int units, const float *bias, int silu, int8_t *q, float *scale,
                      float *sum, float *out) {
    mg_int8 layer = {weights, column_scale};
    int8_job job = {&layer, x, bias, rows, k_size, units, silu, {q, scale, sum, int8_groups(k_size)}, out};
    pool_run(pool, int8_member, &job);
}

void unit_rms_norm(int is_bf16, const float *x, const float *weight, int size, float eps, void *out) {
    if (is_bf16)
        rms_norm_bf16(x, weight, size, eps, out);
    else
        rms_norm_f32(x, weight, size, eps, out);
}

void unit_norm_and_rotate(float *x, const float *norm, const float *cos, const float *sin, int size, float eps) {
    norm_and_rotate_f32(x, norm, cos, sin, size, eps);
}

// Attention of rows [first, first + count) for one KV head; q and attention are [rows, heads, head_dim].
const char *unit_attend(const mg_model *model, const int32_t *memory, const int32_t *ends, mg_workspace *ws, void *q,
                        void *attention, int first, int count, int kv_head) {
    mg_batch batch;
    const char *fault = check_batch(model, ws->max_rows, memory, ends, &batch);
    if (fault) return fault;
    mg_workspace given = {.q = q, .attention = attention, .scratch_size = ws->scratch_size};
    if (model->is_bf16)
        attend_bf16(model, &batch, &given, 0, first, count, kv_head, ws->scratch);
    else
        attend_f32(model, &batch, &given, 0, first, count, kv_head, ws->scratch);
    return NULL;
}

void unit_exp(const float *x, int n, float *out) {
    for (int i = 0; i < n; i += LANES) vf_store(out + i, vf_exp(vf_load(x + i)));
}

// Both ways of rounding: vectors of 16, and one by one.
void unit_to_bf16(const float *x, int n, bf16 *by_vector, bf16 *by_one) {
    for (int i = 0; i < n; i += LANES) bf16_store16(by_vector + i, vf_load(x + i));
    for (int i = 0; i < n; i++) by_one[i] = f32_to_bf16(x[i]);
}

void unit_from_bf16(const bf16 *x, int n, float *by_vector, float *by_one) {
    for (int i = 0; i < n; i += LANES) vf_store(by_vector + i, bf16_load16(x + i));
    for (int i = 0; i < n; i++) by_one[i] = bf16_to_f32(x[i]);
}

float unit_row_max(const float *row, int n) { return row_max(row, n); }

typedef struct {
    int loops, size;
    int32_t *claims;  // [loops, size]: how often each index was given out
} team_job;

static void team_member(mg_member *member, void *arguments) {
    const team_job *job = arguments;
    for (int loop = 0; loop < job->loops; loop++) {
        if (loop % 3 == 2) {
            TEAM_DEALT(i, job->size) job->claims[loop * job->size + i]++;
        } else {
            TEAM_CLAIMED(i, job->size) job->claims[loop * job->size + i]++;
        }
        team_end_loop(member);
        // Behind the barrier everybody sees what all have done, without further care.
        for (int i = 0; i < job->size; i++)
            if (job->claims[loop * job->size + i] != 1) abort();
    }
}

void unit_team(mg_pool *pool, int loops, int size, int32_t *claims) {
    team_job job = {loops, size, claims};
    pool_run(pool, team_member, &job);
}
