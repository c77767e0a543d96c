// Which guesses sequential heads follow, level by level; GuessLists in backends/heads/expansion.py does the same.
#pragma once

// Opens list `list` of sequence s below guess `at` (an index into [lists, k] of the sequence).
static void follow_open(mg_follow *follow, int s, int at, int row_above, int *rows) {
    const long base = (long)s * follow->lists, guess = base * follow->k + at;
    const int list = follow->count[s]++;
    MG_ASSERT(list < follow->lists && at >= 0 && at / follow->k < list);
    follow->below[guess] = list;
    follow->survival[base + list] = follow->survival[base + at / follow->k] * follow->probabilities[guess];
    follow->from[*rows] = row_above;
    follow->token[*rows] = follow->tokens[guess];
    follow->list[*rows] = base + list;
    ++*rows;
}

// The list of a row of the present level, from its logits over the draft vocabulary.
static void follow_guess(mg_follow *follow, const mg_heads *heads, const float *logits, int row) {
    const long at = (long)follow->list[row] * follow->k;
    top_k_row(logits, heads->draft_vocab, follow->k, follow->tokens + at, follow->probabilities + at);
    for (int j = 0; j < follow->k; j++) follow->tokens[at + j] = heads->draft_ids[follow->tokens[at + j]];
}

// Sets up list 0 of each sequence.
static void follow_begin(mg_follow *follow) {
    const long guesses = (long)follow->n * follow->lists * follow->k;
    for (long i = 0; i < guesses; i++) follow->below[i] = -1;
    for (int s = 0; s < follow->n; s++) {
        follow->count[s] = 1;
        follow->first[s] = 0;
        follow->survival[(long)s * follow->lists] = 1.0f;
        follow->from[s] = follow->row[s];
        follow->token[s] = follow->pending[s];
        follow->list[s] = s * follow->lists;
    }
    follow->rows = follow->n;
    follow->levels = 0;
}

// Sets the rows of the next level; none when `more` is 0.
static void follow_choose(mg_follow *follow, int more) {
    int row_above = 0, rows = 0;
    const int k = follow->k;
    follow->levels++;
    for (int s = 0; more && s < follow->n; s++) {
        const int first = follow->first[s], end = follow->count[s];
        const long base = (long)s * follow->lists;
        if (follow->planned && follow->planned[s]) {
            for (int i = end; i < follow->planned[s]; i++) {
                const int above = follow->plan_above[base + i];
                if (above >= end) break;
                follow_open(follow, s, above * k + follow->plan_rank[base + i], row_above + above - first, &rows);
            }
        } else {
            int best[MAX_WIDTH], held = 0;
            float survival[MAX_WIDTH];
            for (int list = first; list < end; list++)
                for (int j = 0; j < k; j++) {
                    const float p = follow->survival[base + list] * follow->probabilities[(base + list) * k + j];
                    if (p < follow->least || (held == follow->width && p <= survival[held - 1])) break;
                    int at = held < follow->width ? held++ : held - 1;
                    for (; at > 0 && p > survival[at - 1]; at--) {
                        survival[at] = survival[at - 1];
                        best[at] = best[at - 1];
                    }
                    survival[at] = p;
                    best[at] = list * k + j;
                }
            for (int i = 0; i < held; i++) follow_open(follow, s, best[i], row_above + best[i] / k - first, &rows);
        }
        row_above += end - first;
        follow->first[s] = end;
    }
    follow->rows = rows;
}
