// What is done with a row of logits: its maximum, its k best, a token drawn from it.
#pragma once

// The maximum of a row; NaN where any of it is. Finite, hence, when a token can be drawn from the row: -inf is a token
// that is never drawn.
static float row_max(const float *row, int n) {
    vf top = vf_set(-INFINITY);
    vi unordered = vi_set(0);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf v = vf_load(row + i);
        unordered = vi_or(unordered, vf_is_nan(v));
        top = vf_max(top, v);
    }
    float m = vf_hmax(top);
    int nan = vi_any(unordered);
    for (; i < n; i++) {
        nan |= row[i] != row[i];
        m = row[i] > m ? row[i] : m;
    }
    return nan ? NAN : m;
}

typedef struct {
    const float *logits;
    const int32_t *row_index;
    int rows, n, k;
    int64_t stride;
    int32_t *ids;
    float *probabilities;
} rank_job;

static void argmax_member(mg_member *member, void *arguments) {
    const rank_job *job = arguments;
    TEAM_DEALT(r, job->rows) {
        const float *row = job->logits + job->row_index[r] * job->stride;
        const float m = row_max(row, job->n);
        int best = 0;
        if (!isfinite(m))
            best = -1;
        else
            while (row[best] != m) best++;
        job->ids[r] = best;
    }
}

static void top_k_row(const float *row, int n, int k, int32_t *id, float *probabilities) {
    const float m = row_max(row, n);
    float best[MAX_RANKS], rest = 0.0f;
    int held = 0;
    vf sum = vf_set(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const int count = n - i < LANES ? n - i : LANES;
        if (count == LANES) {
            const vf v = vf_load(row + i);
            sum = vf_add(sum, vf_exp(vf_sub(v, vf_set(m))));
            if (held == k && !vf_any_above(v, best[k - 1])) continue;
        } else
            for (int j = 0; j < count; j++) rest += expf(row[i + j] - m);
        for (int j = 0; j < count; j++) {
            const float v = row[i + j];
            if (held == k && !(v > best[k - 1])) continue;
            int at = held < k ? held++ : k - 1;
            for (; at > 0 && v > best[at - 1]; at--) {
                best[at] = best[at - 1];
                id[at] = id[at - 1];
            }
            best[at] = v;
            id[at] = i + j;
        }
    }
    const float total = vf_sum(sum) + rest;
    // A row that says nothing guesses nothing: books of drafting must not be multiplied by what is not a number.
    for (int j = 0; j < k; j++) probabilities[j] = isfinite(m) ? expf(best[j] - m) / total : 0.0f;
}

static void top_k_member(mg_member *member, void *arguments) {
    const rank_job *job = arguments;
    TEAM_DEALT(r, job->rows)
        top_k_row(job->logits + r * job->stride, job->n, job->k, job->ids + (long)r * job->k,
                  job->probabilities + (long)r * job->k);
}

typedef struct {
    float weight;
    int32_t id;
} weighted;

static int heavier_first(const void *a, const void *b) {
    const weighted *x = a, *y = b;
    if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

enum { BLOCK = 256 };

// Inverse-CDF draw of one token with uniform number u in [0, 1). weights: scratch of n floats; candidates: of n pairs.
// -1 when there is none to draw: something in the row is NaN or +inf, or all of it is -inf.
static int32_t draw(const float *row, int n, float temperature, int top_k, float top_p, float min_p, double u,
                    float *weights, weighted *candidates) {
    const float m = row_max(row, n);
    if (!isfinite(m)) return -1;
    // At most FLT_MAX, for 0 * inf is no weight.
    const vf inverse = vf_set(fminf(1.0f / temperature, FLT_MAX)), highest = vf_set(m);
    double total = 0.0;
    for (int i = 0; i < n; i += BLOCK) {
        vf sum = vf_set(0.0f);
        for (int j = i; j < i + BLOCK && j < n; j += LANES) {
            vf v = vf_set(-INFINITY);
            memcpy(&v, row + j, sizeof(float) * (n - j < LANES ? n - j : LANES));
            v = vf_exp(vf_mul(vf_sub(v, highest), inverse));
            sum = vf_add(sum, v);
            memcpy(weights + j, &v, sizeof(float) * (n - j < LANES ? n - j : LANES));
        }
        total += vf_sum(sum);
    }
    if (top_k <= 0 && top_p >= 1.0f && min_p <= 0.0f) {
        double target = u * total, passed = 0.0;
        int last = 0;
        for (int i = 0; i < n; i++)
            if (weights[i] > 0.0f) {
                passed += weights[i];
                last = i;
                if (passed > target) return i;
            }
        return last;
    }
    // Collect every weight above a threshold, lowering it until the filters' cut lies inside what was collected. A
    // top-p share of the top k needs all of the k, also those that min-p will drop.
    const int whole_top_k = top_k > 0 && top_p < 1.0f;
    int held = 0;
    for (float threshold = 1e-3f;; threshold *= 1e-3f) {
        const int everything = threshold < 1e-36f;
        held = 0;
        double mass = 0.0;
        for (int i = 0; i < n; i++)
            if (weights[i] >= threshold || everything) {
                candidates[held++] = (weighted){weights[i], i};
                mass += weights[i];
            }
        if (everything || (top_k > 0 && held >= top_k) || (top_k <= 0 && mass >= (double)top_p * total) ||
            (threshold <= min_p && !whole_top_k))
            break;
    }
    // The highest logit has weight 1, so something is always held.
    MG_ASSERT(held > 0);
    qsort(candidates, held, sizeof *candidates, heavier_first);
    if (top_k > 0 && held > top_k) held = top_k;
    if (top_p < 1.0f) {
        double goal = total;
        if (top_k > 0) {
            goal = 0.0;
            for (int i = 0; i < held; i++) goal += candidates[i].weight;
        }
        goal *= (double)top_p;
        int cut = 0;
        for (double passed = 0.0; cut < held && passed < goal; cut++) passed += candidates[cut].weight;
        held = cut > 0 ? cut : 1;
    }
    while (held > 1 && candidates[held - 1].weight < min_p) held--;
    double kept_total = 0.0;
    for (int i = 0; i < held; i++) kept_total += candidates[i].weight;
    double target = u * kept_total, passed = 0.0;
    for (int i = 0; i < held; i++) {
        passed += candidates[i].weight;
        if (passed > target) return candidates[i].id;
    }
    return candidates[held - 1].id;
}

typedef struct {
    const float *logits;
    const int32_t *row_index;
    int rows, n;
    int64_t stride;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const double *u;
    int32_t *out;
    atomic_int failed;
} sample_job;

static void sample_member(mg_member *member, void *arguments) {
    sample_job *job = arguments;
    TEAM_CLAIMED(r, job->rows) {
        float *weights = aligned(sizeof(float) * job->n);
        weighted *candidates = aligned(sizeof(weighted) * job->n);
        if (weights && candidates)
            job->out[r] = draw(job->logits + job->row_index[r] * job->stride, job->n, job->temperature[r],
                               job->top_k[r], job->top_p[r], job->min_p[r], job->u[r], weights, candidates);
        else
            atomic_store(&job->failed, 1);
        free(weights);
        free(candidates);
    }
}
