// Which candidates a step drafts; tree_builder.py (best_first) does the same, and is what this is tested against.
// Plain C for any CPU: it follows lists, so there is nothing for wide registers. Called without Python's lock.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// One sequence's guesses: those of its heads as lists of `k` siblings, then chains of other drafters.
typedef struct {
    const int32_t *tokens;       // [lists, k]; NULL: no lists
    const float *probabilities;  // [lists, k]
    const int32_t *below;        // [lists, k]; NULL: list i + 1 follows each guess of list i
    const uint8_t *forced;       // [lists]: the grammar's lists; NULL for none
    double trust;
    int32_t lists, k, max_nodes, max_depth, longest;
    int32_t first_chain, chains;  // of the step's chains
    int32_t unused;
} mg_plan_request;

// A chain's tokens stand behind each other in arrays of the whole step.
typedef struct {
    int32_t first, length, source, unused;
} mg_plan_chain;

typedef struct {
    double base_tokens, base_ms, row_cost_factor, give_up;
    int32_t requests, node_budget, of_heads, of_grammar;
} mg_plan_step;

// A list of siblings once it is looked at.
typedef struct {
    int32_t n;
    int32_t *token, *below, *source;
    double *chance;
} plan_list;

typedef struct plan_block {
    struct plan_block *before;
    size_t used, size;
} plan_block;

typedef struct {
    plan_block *last;
    int failed;
} plan_arena;

static void *plan_take(plan_arena *arena, size_t bytes) {
    bytes = (bytes + 15) & ~(size_t)15;
    if (!arena->last || arena->last->size - arena->last->used < bytes) {
        const size_t size = bytes > 1 << 16 ? bytes : 1 << 16;
        plan_block *block = malloc(sizeof(plan_block) + 16 + size);
        if (!block) {
            arena->failed = 1;
            return NULL;
        }
        *block = (plan_block){arena->last, 0, size};
        arena->last = block;
    }
    char *start = (char *)(((uintptr_t)(arena->last + 1) + 15) & ~(uintptr_t)15);
    void *found = start + arena->last->used;
    arena->last->used += bytes;
    return found;
}

static void plan_free(plan_arena *arena) {
    while (arena->last) {
        plan_block *before = arena->last->before;
        free(arena->last);
        arena->last = before;
    }
}

static plan_list *plan_new_list(plan_arena *arena, int most) {
    plan_list *list = plan_take(arena, sizeof(plan_list));
    char *memory = plan_take(arena, (size_t)most * 20 + 16);
    if (!list || !memory) return NULL;
    list->n = 0;
    list->chance = (double *)memory;
    list->token = (int32_t *)(list->chance + most);
    list->below = list->token + most;
    list->source = list->below + most;
    return list;
}

static void plan_append(plan_list *list, int32_t token, double chance, int32_t below, int32_t source) {
    const int at = list->n++;
    list->token[at] = token;
    list->chance[at] = chance;
    list->below[at] = below;
    list->source[at] = source;
}

// One sequence while its tree grows. Lists beyond those of its heads follow one path each: their numbers go on behind
// `lists`, one of which is left out.
typedef struct {
    const mg_plan_request *request;
    const mg_plan_step *step;
    plan_list **list;  // [lists + 1 + paths]; NULL: not looked at yet
    int32_t lists, paths, taken;
} plan_sequence;

static plan_list plan_nothing = {0};

static plan_list *plan_guesses(plan_arena *arena, plan_sequence *sequence, int32_t index) {
    if (index < 0 || index > sequence->lists + sequence->paths) return &plan_nothing;
    if (sequence->list[index]) return sequence->list[index];
    const mg_plan_request *request = sequence->request;
    if (index >= sequence->lists) return &plan_nothing;
    plan_list *found = plan_new_list(arena, request->k);
    if (!found) return &plan_nothing;
    const long base = (long)index * request->k;
    for (int rank = 0; rank < request->k; rank++) {
        double chance = request->probabilities[base + rank];
        if (request->trust != 1.0) {
            chance *= request->trust;
            if (chance > 1.0) chance = 1.0;
        }
        const int32_t token = request->tokens[base + rank];
        const int32_t below = request->below                 ? request->below[base + rank]
                              : index + 1 < request->lists ? index + 1
                                                           : -1;
        const int forced = request->forced && request->forced[index] && token == request->tokens[base];
        plan_append(found, token, chance, below, forced ? sequence->step->of_grammar : sequence->step->of_heads);
    }
    return sequence->list[index] = found;
}

static int plan_reaches(const plan_sequence *sequence, int depth, const plan_list *list, int rank) {
    return depth <= sequence->request->max_depth || list->source[rank] != sequence->step->of_heads;
}

// The chance of a list's best guess; 0 where there is none, or `depth` is too deep for it.
static double plan_first(plan_arena *arena, plan_sequence *sequence, int depth, int32_t index) {
    const mg_plan_request *request = sequence->request;
    if (depth <= request->max_depth && index >= 0 && index < sequence->lists && !sequence->list[index]) {
        const double chance = request->probabilities[(long)index * request->k] * request->trust;
        return chance > 1.0 ? 1.0 : chance;
    }
    const plan_list *list = plan_guesses(arena, sequence, index);
    return list->n && plan_reaches(sequence, depth, list, 0) ? list->chance[0] : 0.0;
}

// Puts a chain's tokens among the guesses that are there, each in a list of its own path.
static void plan_join(plan_arena *arena, plan_sequence *sequence, const mg_plan_chain *chain, const int32_t *tokens,
                      const double *chances) {
    int32_t index = 0;
    for (int depth = 0; depth < chain->length && depth < sequence->request->longest; depth++) {
        const int32_t token = tokens[chain->first + depth];
        const double chance = chances[chain->first + depth];
        const plan_list *old = plan_guesses(arena, sequence, index);
        plan_list *list = plan_new_list(arena, old->n + 1);
        if (!list) return;
        double known = 0.0;
        int32_t below = -1;
        for (int rank = 0; rank < old->n; rank++)
            if (old->token[rank] == token) {
                known = old->chance[rank];
                below = old->below[rank];
                break;
            }
        if (known < chance) {
            // The other guesses share what is left.
            const double unknown = 1.0 - known;
            double left = (1.0 - chance) / (unknown < 1e-6 ? 1e-6 : unknown);
            if (left > 1.0) left = 1.0;
            // Stable, best first, the new one behind its equals.
            for (int rank = 0; rank <= old->n; rank++) {
                const int is_new = rank == old->n;
                if (!is_new && old->token[rank] == token) continue;
                const double each = is_new ? chance : old->chance[rank] * left;
                int at = list->n++;
                for (; at > 0 && list->chance[at - 1] < each; at--) {
                    list->token[at] = list->token[at - 1];
                    list->chance[at] = list->chance[at - 1];
                    list->below[at] = list->below[at - 1];
                    list->source[at] = list->source[at - 1];
                }
                list->token[at] = is_new ? token : old->token[rank];
                list->chance[at] = each;
                list->below[at] = is_new ? below : old->below[rank];
                list->source[at] = is_new ? chain->source : old->source[rank];
            }
        } else {
            for (int rank = 0; rank < old->n; rank++)
                plan_append(list, old->token[rank], old->chance[rank], old->below[rank], old->source[rank]);
        }
        // The next token's list follows this path only, whatever else the list below follows.
        int32_t path = below;
        if (path <= sequence->lists) {
            const int deeper = depth + 1 < sequence->request->max_depth;
            plan_list *following = deeper ? plan_guesses(arena, sequence, below) : &plan_nothing;
            path = sequence->lists + ++sequence->paths;
            sequence->list[path] = following;
        }
        for (int rank = 0; rank < list->n; rank++)
            if (list->token[rank] == token) list->below[rank] = path;
        sequence->list[index] = list;
        index = path;
    }
}

static int plan_open(plan_arena *arena, plan_sequence *sequence, const mg_plan_request *request,
                     const mg_plan_step *step, const mg_plan_chain *chains, const int32_t *tokens,
                     const double *chances) {
    sequence->request = request;
    sequence->step = step;
    sequence->lists = request->tokens ? request->lists : 0;
    size_t most = sequence->lists + 1;
    for (int i = 0; i < request->chains; i++) most += chains[request->first_chain + i].length;
    sequence->list = plan_take(arena, most * sizeof(plan_list *));
    if (!sequence->list) return 0;
    memset(sequence->list, 0, most * sizeof(plan_list *));
    for (int i = 0; i < request->chains; i++)
        plan_join(arena, sequence, chains + request->first_chain + i, tokens, chances);
    return 1;
}

// What may be taken next: a guess, its chance with all above it, and that of what is above it.
typedef struct {
    double survival, above;
    int32_t depth, key, serial, index, rank, parent;
} plan_entry;

static int plan_before(const plan_entry *a, const plan_entry *b) {
    if (a->survival != b->survival) return a->survival > b->survival;
    if (a->depth != b->depth) return a->depth < b->depth;
    if (a->key != b->key) return a->key < b->key;
    return a->serial < b->serial;
}

static void plan_push(plan_entry *heap, int *size, plan_entry entry) {
    int at = (*size)++;
    for (; at > 0 && plan_before(&entry, heap + (at - 1) / 2); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = entry;
}

static plan_entry plan_pop(plan_entry *heap, int *size) {
    const plan_entry top = heap[0], moved = heap[--*size];
    int at = 0;
    for (int child; (child = 2 * at + 1) < *size; at = child) {
        if (child + 1 < *size && plan_before(heap + child + 1, heap + child)) child++;
        if (!plan_before(heap + child, &moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
    return top;
}

static int plan_run(plan_arena *arena, const mg_plan_step *step, const mg_plan_request *requests,
                    const mg_plan_chain *chains, const int32_t *chain_tokens, const double *chances,
                    const double *forward_ms, int32_t *counts, int32_t *nodes, double *survivals) {
    const int n = step->requests, budget = step->node_budget > 0 ? step->node_budget : 0;
    plan_sequence *sequences = plan_take(arena, (n + 1) * sizeof(plan_sequence));
    plan_entry *heap = plan_take(arena, (n + 2 * (size_t)budget + 2) * sizeof(plan_entry));
    int32_t *order = plan_take(arena, (4 * (size_t)budget + 4) * sizeof(int32_t));
    double *chance_of = plan_take(arena, (budget + 1) * sizeof(double));
    if (arena->failed) return -1;
    int size = 0, taken = 0, best = 0, serial = 0;
    for (int key = 0; key < n; key++) {
        const mg_plan_request *request = requests + key;
        counts[key] = 0;
        sequences[key] = (plan_sequence){0};
        if (request->max_nodes <= 0 || request->max_depth <= 0) continue;
        double survival;
        if (!request->chains && request->tokens) {
            survival = request->probabilities[0] * request->trust;
            if (survival > 1.0) survival = 1.0;
        } else {
            if (!plan_open(arena, sequences + key, request, step, chains, chain_tokens, chances)) return -1;
            survival = plan_first(arena, sequences + key, 1, 0);
        }
        if (survival > 0.0) plan_push(heap, &size, (plan_entry){survival, 1.0, 1, key, 0, 0, 0, 0});
    }
    double tokens = step->base_tokens, best_ratio = tokens / step->base_ms;
    while (size && taken < budget) {
        const plan_entry entry = plan_pop(heap, &size);
        const mg_plan_request *request = requests + entry.key;
        plan_sequence *sequence = sequences + entry.key;
        // Of many sequences few nodes are taken: the others are never unpacked.
        if (!sequence->list && !plan_open(arena, sequence, request, step, chains, chain_tokens, chances)) return -1;
        if (sequence->taken >= request->max_nodes) continue;
        const plan_list *siblings = plan_guesses(arena, sequence, entry.index);
        if (arena->failed) return -1;
        int32_t *node = order + 4 * (long)taken;
        node[0] = entry.key;
        node[1] = siblings->token[entry.rank];
        node[2] = entry.parent;
        node[3] = siblings->source[entry.rank];
        chance_of[taken++] = entry.survival;
        tokens += entry.survival;
        const double ratio = tokens / (step->base_ms + (forward_ms[taken] - forward_ms[0]) * step->row_cost_factor);
        if (ratio > best_ratio) {
            best_ratio = ratio;
            best = taken;
        } else if (ratio < best_ratio * step->give_up)
            break;
        if (++sequence->taken >= request->max_nodes) continue;
        serial += 2;
        const int rank = entry.rank + 1;
        if (rank < siblings->n && plan_reaches(sequence, entry.depth, siblings, rank)) {
            const double sibling = entry.above * siblings->chance[rank];
            if (sibling > 0.0)
                plan_push(heap, &size,
                          (plan_entry){sibling, entry.above, entry.depth, entry.key, serial, entry.index, rank,
                                       entry.parent});
        }
        const int32_t following = siblings->below[entry.rank];
        if (following >= 0) {
            const double child = entry.survival * plan_first(arena, sequence, entry.depth + 1, following);
            if (child > 0.0)
                plan_push(heap, &size,
                          (plan_entry){child, entry.survival, entry.depth + 1, entry.key, serial + 1, following, 0,
                                       sequence->taken});
        }
    }
    // By sequence, each one's in the order in which they were taken.
    for (int i = 0; i < best; i++) counts[order[4 * (long)i]]++;
    int32_t *at = plan_take(arena, (n + 1) * sizeof(int32_t));
    if (!at || arena->failed) return -1;
    for (int key = 0, sum = 0; key < n; sum += counts[key++]) at[key] = sum;
    for (int i = 0; i < best; i++) {
        const int32_t *node = order + 4 * (long)i;
        const int place = at[node[0]]++;
        nodes[place] = node[1];
        nodes[budget + place] = node[2];
        nodes[2 * (long)budget + place] = node[3];
        survivals[place] = chance_of[i];
    }
    return best;
}

// Takes nodes best first over all sequences, as many as maximise expected tokens per millisecond.
//
// forward_ms [node_budget + 1]: a forward of the rows that there are in any case, and with each further one. counts
// [requests]: nodes of each sequence; nodes [3, node_budget]: their tokens, their parents' rows, who guessed them;
// survivals [node_budget]. Returns how many there are, or -1 when memory is short.
int mg_plan(const mg_plan_step *step, const mg_plan_request *requests, const mg_plan_chain *chains,
            const int32_t *chain_tokens, const double *chances, const double *forward_ms, int32_t *counts,
            int32_t *nodes, double *survivals) {
    plan_arena arena = {0};
    const int found = plan_run(&arena, step, requests, chains, chain_tokens, chances, forward_ms, counts, nodes, survivals);
    plan_free(&arena);
    return found;
}
