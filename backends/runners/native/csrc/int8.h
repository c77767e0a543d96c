// Linear layers with eight-bit weights and activations, for the heads only: what they say is a guess that the backbone
// checks, so a rounding changes how good a guess is, never a token of the answer.
//
// Packed operand: as in transformer.h with four elements of K to a step: units of 16 output columns, [K / 4][16][4].
// A weight is (q - 128) * scale[column], unsigned as the instruction wants it. An activation is q * the scale of its
// group of 64 elements along K: hidden states have a few elements ten times as large as the rest, which would leave the
// others of the whole row three bits. Integer sums of a group are exact, groups are added in order of K.
#pragma once
#include "simd.h"
#include "thread_pool.h"

enum { GROUP = 64, MOST_ROWS = 3 };

_Static_assert(GROUP % LANES == 0 && GROUP % 4 == 0, "a group is made of whole vectors and whole steps");
_Static_assert(GROUP * 127L * 255L < INT32_MAX, "a group's sum of products must fit 32 bits");

// Activations as the layers take them: x [rows, size], scale [rows, groups]; sum [rows] of the row as rounded.
typedef struct {
    int8_t *x;
    float *scale, *sum;
    int groups;
} int8_rows;

INLINE int int8_groups(int size) { return (size + GROUP - 1) / GROUP; }

// y [m_count, 4] = m_count rows from `row` on, times n_count units.
INLINE void int8_tile(int m_count, int n_count, const mg_int8 *layer, long first_unit, int k_size,
                      const int8_rows *rows, int row, vf *y) {
    vf total[MOST_ROWS][4];
    const long unit_size = (long)k_size * LANES;
    const uint8_t *unit = layer->weights + first_unit * unit_size;
    const int8_t *x = rows->x + (long)row * k_size;
    const float *scale = rows->scale + (long)row * rows->groups;
#pragma GCC unroll 3
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) total[m][n] = vf_set(-128.0f * rows->sum[row + m]);
    for (int group = 0; group < rows->groups; group++) {
        int8_sums acc[MOST_ROWS][4];
#pragma GCC unroll 3
        for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
            for (int n = 0; n < n_count; n++) acc[m][n] = int8_none();
        const int end = (group + 1) * GROUP < k_size ? (group + 1) * GROUP : k_size;
        for (int k = group * GROUP; k < end; k += 4) {
#pragma GCC unroll 3
            for (int m = 0; m < m_count; m++) {
                const int8_four four = int8_spread(x + (long)m * k_size + k);
#pragma GCC unroll 4
                for (int n = 0; n < n_count; n++) acc[m][n] = int8_step(acc[m][n], unit + n * unit_size, four);
            }
            unit += LANES * 4;
        }
#pragma GCC unroll 3
        for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
            for (int n = 0; n < n_count; n++)
                total[m][n] =
                    vf_fma(vi_to_float(int8_columns(acc[m][n])), vf_set(scale[m * rows->groups + group]), total[m][n]);
    }
#pragma GCC unroll 3
    for (int m = 0; m < m_count; m++)
#pragma GCC unroll 4
        for (int n = 0; n < n_count; n++) 
            y[m * 4 + n] = vf_mul(total[m][n], vf_load(layer->scale + (first_unit + n) * LANES));
}

static void int8_multiply(int m_count, int n_count, const mg_int8 *layer, long first_unit, int k_size,
                          const int8_rows *rows, int row, vf *y) {
// clang-format off
#define CASE(M, N) \
    case (M) * 8 + (N): int8_tile(M, N, layer, first_unit, k_size, rows, row, y); break;
    switch (m_count * 8 + n_count) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(1, 4) CASE(2, 4) CASE(3, 4)
        default: MG_ASSERT(!"no such tile");
    }
#undef CASE
    // clang-format on
}

// out [count, units * 16] = rows times units [first_unit, first_unit + units) of the layer; with `silu`,
// silu(. + bias).
static void int8_linear(mg_member *member, const int8_rows *rows, int count, int k_size, const mg_int8 *layer,
                        long first_unit, int units, const float *bias, int silu, float *out) {
    TEAM_CLAIMED(chunk, (units + 3) / 4) {
        const int begin = chunk * 4, width = units - begin < 4 ? units - begin : 4;
        for (int n = 0; n < width;) {
            const int most = PART_LANES == 16 || count == 1 ? 4 : 1, left = width - n;  // as many as fit the registers
            const int n_count = left >= 4 && most == 4 ? 4 : left >= 2 && most == 4 ? 2 : 1;
            for (int row = 0; row < count; row += MOST_ROWS) {
                const int m_count = count - row < MOST_ROWS ? count - row : MOST_ROWS;
                vf y[MOST_ROWS * 4];
                int8_multiply(m_count, n_count, layer, first_unit + begin + n, k_size, rows, row, y);
                for (int m = 0; m < m_count; m++)
                    for (int j = 0; j < n_count; j++) {
                        const long column = (long)(begin + n + j) * LANES;
                        vf v = y[m * 4 + j];
                        if (silu) v = vf_silu(vf_add(v, vf_load(bias + column)));
                        vf_store(out + (long)(row + m) * units * LANES + column, v);
                    }
            }
            n += n_count;
        }
    }
    team_end_loop(member);
}

// x [size] into row `row`.
static void int8_quantise(const float *x, int size, const int8_rows *rows, int row) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    int8_t *out = rows->x + (long)row * size;
    vf sum = vf_set(0.0f);
    for (int group = 0; group < rows->groups; group++) {
        const int begin = group * GROUP, end = begin + GROUP < size ? begin + GROUP : size;
        vf top = vf_set(0.0f), sums = vf_set(0.0f);
        for (int i = begin; i < end; i += LANES) top = vf_max(top, vf_max(vf_load(x + i), vf_neg(vf_load(x + i))));
        const float most = vf_hmax(top), scale = most / 127.0f;
        const vf inverse = vf_set(most > 0.0f ? 127.0f / most : 0.0f);
        rows->scale[(long)row * rows->groups + group] = scale;
        for (int i = begin; i < end; i += LANES) {
            const vf shifted = vf_fma(vf_load(x + i), inverse, vf_set(magic));
            int8_store16(out + i, vi_sub(vf_bits(shifted), vf_bits(vf_set(magic))));
            sums = vf_add(sums, vf_sub(shifted, vf_set(magic)));
        }
        sum = vf_fma(sums, vf_set(scale), sum);
    }
    rows->sum[row] = vf_sum(sum);
}

INLINE vf load16(const void *p, long i, int is_bf16) {
    return is_bf16 ? bf16_load16((const bf16 *)p + i) : vf_load((const float *)p + i);
}

// out [size] = x / sqrt(mean(x^2) + eps)
INLINE void int8_norm(const float *x, int size, float eps, float *out) {
    const vf scale = rms_scale_f32(x, size, eps);
    for (int i = 0; i < size; i += LANES) vf_store(out + i, vf_mul(vf_load(x + i), scale));
}

typedef struct {
    const mg_heads *heads;
    mg_follow *follow;
    const void *hidden;
    float *input, *act, *states[2], *logits;  // of each row
    int8_rows x, a, s;
} follow_int8_job;

// As follow_member in transformer.h.
static void follow_int8_member(mg_member *member, void *arguments) {
    const follow_int8_job *job = arguments;
    const mg_heads *heads = job->heads;
    mg_follow *follow = job->follow;
    const int hidden = heads->hidden, inner = heads->inner, in_size = heads->in_size, width = heads->draft_vocab_padded;
    for (int level = 0; level < heads->heads && follow->rows; level++) {
        const int rows = follow->rows;
        float *states = job->states[level % 2];
        const float *above = job->states[(level + 1) % 2];
        if (level == 0) {
            TEAM_DEALT(r, rows)
                for (int i = 0; i < hidden; i += LANES)
                    vf_store((float *)above + (long)r * hidden + i,
                             load16(job->hidden, (long)follow->from[r] * hidden + i, heads->is_bf16));
            team_end_loop(member);
        }
        TEAM_DEALT(r, rows) {
            float *input = job->input + (long)r * in_size, *embedding = input + hidden;
            for (int i = 0; i < hidden; i += LANES)
                vf_store(embedding + i, load16(heads->embed, (long)follow->token[r] * hidden + i, heads->is_bf16));
            int8_norm(embedding, hidden, 1e-12f, embedding);
            int8_norm(above + (long)(level ? follow->from[r] : r) * hidden, hidden, 1e-6f, input);
            int8_quantise(input, in_size, &job->x, r);
        }
        team_end_loop(member);
        int8_linear(member, &job->x, rows, in_size, &heads->up8, (long)level * inner / LANES, inner / LANES,
                    heads->up_bias + (long)level * inner, 1, job->act);
        TEAM_DEALT(r, rows) int8_quantise(job->act + (long)r * inner, inner, &job->a, r);
        team_end_loop(member);
        int8_linear(member, &job->a, rows, inner, &heads->down8, (long)level * hidden / LANES, hidden / LANES, NULL, 0,
                    states);
        TEAM_DEALT(r, rows) {
            float *state = states + (long)r * hidden;
            const float *from = above + (long)(level ? follow->from[r] : r) * hidden;
            for (int i = 0; i < hidden; i += LANES) vf_store(state + i, vf_add(vf_load(state + i), vf_load(from + i)));
            int8_quantise(state, hidden, &job->s, r);
        }
        team_end_loop(member);
        int8_linear(member, &job->s, rows, hidden, &heads->draft_lm_head8, 0, width / LANES, NULL, 0, job->logits);
        TEAM_DEALT(r, rows) follow_guess(follow, heads, job->logits + (long)r * width, r);
        team_end_loop(member);
        if (member->index == 0) follow_choose(follow, level + 1 < heads->heads);
        team_end_loop(member);
    }
}
