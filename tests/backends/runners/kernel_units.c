// Single functions of the kernels, made callable for tests/backends/runners/test_kernel_units.py.
#include "kernels.c"

#define unit_attend VARIANT(unit_attend)
#define unit_exp VARIANT(unit_exp)
#define unit_from_bf16 VARIANT(unit_from_bf16)
#define unit_int8_linear VARIANT(unit_int8_linear)
#define unit_linear VARIANT(unit_linear)
#define unit_norm_and_rotate VARIANT(unit_norm_and_rotate)
#define unit_rms_norm VARIANT(unit_rms_norm)
#define unit_row_max VARIANT(unit_row_max)
#define unit_sum VARIANT(unit_sum)
#define unit_team VARIANT(unit_team)
#define unit_to_bf16 VARIANT(unit_to_bf16)

typedef struct {
    mg_epilogue epilogue;
    const void *x, *weights;
    long ldx, lda;
    int is_int8, rows, k_size, units;
    const float *bias;
    float *out;
    void *act, *room;
} linear_job;

#define A_IS_FLOAT (!HAS_DOT)

#if A_IS_FLOAT
static void to_operands(const bf16 *x, long n, float *out) {
    for (long i = 0; i < n; i += LANES) put16_bf16(out + i, bf16_load16(x + i));
}
static void from_operands(const float *x, long n, bf16 *out) {
    for (long i = 0; i < n; i += LANES) bf16_store16(out + i, get16_bf16(x + i));
}
#else
static void to_operands(const bf16 *x, long n, float *out) { (void)x, (void)n, (void)out; }
static void from_operands(const float *x, long n, bf16 *out) { (void)x, (void)n, (void)out; }
#endif

static void linear_member_bf16(mg_member *member, void *arguments) {
    const linear_job *job = arguments;
    const void *x = operands_bf16(member, job->x, (job->rows - 1) * job->ldx + job->k_size, job->room);
    linear_bf16(member, job->epilogue, x, job->ldx, job->rows, job->k_size, job->weights, job->is_int8, job->units,
                job->bias, job->out, (long)job->units * LANES, job->act, job->lda);
}

static void linear_member_f32(mg_member *member, void *arguments) {
    const linear_job *job = arguments;
    linear_f32(member, job->epilogue, job->x, job->ldx, job->rows, job->k_size, job->weights, job->is_int8, job->units,
               job->bias, job->out, (long)job->units * LANES, job->act, job->lda);
}

// act [rows, lda] in the element type of x.
void unit_linear(mg_pool *pool, int is_bf16, int is_int8, int epilogue, const void *x, long ldx, int rows, int k_size,
                 const void *weights, int units, const float *bias, float *out, void *act, long lda) {
    const int made = is_bf16 && A_IS_FLOAT;
    void *room = made ? malloc(sizeof(float) * rows * ldx) : NULL;
    float *floats = made && act ? malloc(sizeof(float) * rows * lda) : NULL;
    void *act_of_job = floats ? floats : act;
    linear_job job = {epilogue, x, weights, ldx, lda, is_int8, rows, k_size, units, bias, out, act_of_job, room};
    pool_run(pool, is_bf16 ? linear_member_bf16 : linear_member_f32, &job);
    const int columns = units * LANES / (epilogue == SILU_MUL ? 2 : 1);
    for (int m = 0; floats && m < rows; m++)
        from_operands(floats + m * lda, columns, (bf16 *)act + m * lda);
    free(room);
    free(floats);
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
    const long n = (long)batch.rows * model->heads * model->head_dim;
    if (!model->is_bf16 || !A_IS_FLOAT) {
        mg_workspace given = {.q = q, .attention = attention, .scratch_size = ws->scratch_size};
        if (model->is_bf16)
            attend_bf16(model, &batch, &given, 0, first, count, kv_head, ws->scratch);
        else
            attend_f32(model, &batch, &given, 0, first, count, kv_head, ws->scratch);
        return NULL;
    }
    float *floats = malloc(sizeof(float) * 2 * n), *found = floats + n;
    to_operands(q, n, floats);
    to_operands(attention, n, found);
    mg_workspace given = {.q = floats, .attention = found, .scratch_size = ws->scratch_size};
    attend_bf16(model, &batch, &given, 0, first, count, kv_head, ws->scratch);
    from_operands(found, n, attention);
    free(floats);
    return NULL;
}

void unit_exp(const float *x, int n, float *out) {
    for (int i = 0; i < n; i += LANES) vf_store(out + i, vf_exp(vf_load(x + i)));
}

void unit_sum(const float *x, float *out) { *out = vf_sum(vf_load(x)); }

// All ways of rounding: vectors of 16 into the type, into floats, and one by one.
void unit_to_bf16(const float *x, int n, bf16 *by_vector, float *rounded, bf16 *by_one) {
    for (int i = 0; i < n; i += LANES) bf16_store16(by_vector + i, vf_load(x + i));
    for (int i = 0; i < n; i += LANES) vf_store(rounded + i, vf_round_bf16(vf_load(x + i)));
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
