// A program that tells two processors apart by the bits of their results, for tests/backends/runners/test_arm.py.
//
// Without arguments it prints a line for every kernel: its name, and a hash of what it gives for random numbers in odd
// shapes. With the name of a file it runs the calls of a model that another machine has recorded there (Recording in
// tests/support/arm.py), and prints for each what it was and whether the bits are those of the recording. With
// "variants" it prints those that the CPU can run, best first.
#include <stdio.h>

#include "kernel_units.c"

// Random numbers, the same everywhere.
static uint64_t state = 0x9e3779b97f4a7c15u;
static uint32_t bits(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)(state * 0x2545f4914f6cdd1dull >> 32);
}
static int below(int n) { return (int)(bits() % (uint32_t)n); }
enum { LEAST = -70 };  // with numbers as small as this, also denormal ones
// Of either sign, from 2^lowest to 2^highest.
static float number(int lowest, int highest) {
    const uint32_t u = bits(), exponent = (uint32_t)(127 + lowest + below(highest - lowest)) << 23;
    const uint32_t whole = (u & 0x807fffffu) | (lowest == LEAST && u % 7 == 0 ? 0 : exponent);
    float f;
    memcpy(&f, &whole, 4);
    return f;
}

static void *room(size_t bytes) {
    void *found = aligned(bytes + 64);
    if (!found) abort();
    memset(found, 0, bytes + 64);
    return found;
}
static float *floats(long n, int lowest, int highest) {
    float *found = room(sizeof(float) * n);
    for (long i = 0; i < n; i++) found[i] = number(lowest, highest);
    return found;
}
// n numbers of the element type.
static void *elements(int is_bf16, long n, int lowest, int highest) {
    float *found = floats(n, lowest, highest);
    if (!is_bf16) return found;
    bf16 *rounded = room(sizeof(bf16) * n);
    for (long i = 0; i < n; i++) rounded[i] = f32_to_bf16(found[i]);
    free(found);
    return rounded;
}

static uint64_t hash = 0xcbf29ce484222325u;
static void add(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 4) {
        uint32_t word;
        memcpy(&word, (const char *)data + i, 4);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
}
static void tell(const char *name) {
    printf("%s %016llx\n", name, (unsigned long long)hash);
    hash = 0xcbf29ce484222325u;
}
static void good(const char *fault) {
    if (fault) {
        fprintf(stderr, "%s\n", fault);
        exit(1);
    }
}

static void linear_layers(mg_pool *pool, int is_bf16, int lowest, int highest) {
    static const int rows_of[] = {1, 2, 3, 4, 5, 6, 7, 11, 13, 97}, k_of[] = {16, 208, 32, 336};
    static const int units_of[] = {1, 7, 131, 4};
    for (int r = 0; r < 10; r++)
        for (int s = 0; s < 4; s++) {
            const int rows = rows_of[r], k = k_of[s], units = units_of[s], n = units * LANES, size = is_bf16 ? 2 : 4;
            if (units > 128 && rows > 7) continue;
            void *x = elements(is_bf16, (long)rows * (k + 16), lowest, highest), *act = room(4l * rows * n);
            void *weights = elements(is_bf16, (long)n * k, lowest, highest);
            float *bias = floats(n, -3, 3), *out = floats((long)rows * n, -3, 3);
            unit_linear(pool, is_bf16, 0, STORE, x, k + 16, rows, k, weights, units, bias, out, NULL, 0);
            add(out, 4l * rows * n);
            unit_linear(pool, is_bf16, 0, ADD, x, k + 16, rows, k, weights, units, NULL, out, NULL, 0);
            add(out, 4l * rows * n);
            unit_linear(pool, is_bf16, 0, STORE_SILU, x, k + 16, rows, k, weights, units, bias, NULL, act, n);
            add(act, (long)size * rows * n);
            if (units % 2 == 0) {
                unit_linear(pool, is_bf16, 0, SILU_MUL, x, k + 16, rows, k, weights, units, NULL, NULL, act, n / 2);
                add(act, (long)size * rows * n / 2);
            }
            free(x), free(act), free(weights), free(bias), free(out);
        }
}

static void eight_bits(mg_pool *pool) {
    static const int rows_of[] = {1, 2, 3, 4, 10}, k_of[] = {16, 64, 96, 208}, units_of[] = {1, 3, 7, 5};
    for (int r = 0; r < 5; r++)
        for (int s = 0; s < 4; s++) {
            const int rows = rows_of[r], k = k_of[s], units = units_of[s], n = units * LANES, groups = int8_groups(k);
            float *x = floats((long)rows * k, -8, 4), *scale = floats(n, -8, 0), *bias = floats(n, -3, 3);
            uint8_t *weights = room((size_t)n * k);
            for (long i = 0; i < (long)n * k; i++) weights[i] = (uint8_t)below(256);
            weights[0] = 0, weights[1] = 255;
            int8_t *q = room((size_t)rows * k);
            float *group_scale = room(4l * rows * groups), *sum = room(4l * rows), *out = room(4l * rows * n);
            unit_int8_linear(pool, x, rows, k, weights, scale, units, bias, r % 2, q, group_scale, sum, out);
            add(q, (size_t)rows * k);
            add(group_scale, 4l * rows * groups);
            add(sum, 4l * rows);
            add(out, 4l * rows * n);
            free(x), free(scale), free(bias), free(weights), free(q), free(group_scale), free(sum), free(out);
        }
}

static void norms(int is_bf16) {
    static const int sizes[] = {16, 48, 80, 576};
    for (int s = 0; s < 4; s++) {
        const int size = sizes[s];
        float *x = floats(size, -12, 6), *weight = floats(size, -2, 2), *angles = floats(size, -6, 0);
        void *out = room(4l * size);
        unit_rms_norm(is_bf16, x, weight, size, 1e-5f, out);
        add(out, (is_bf16 ? 2l : 4l) * size);
        unit_norm_and_rotate(x, s % 2 ? weight : NULL, angles, angles + size / 2, size, 1e-6f);
        add(x, 4l * size);
        free(x), free(weight), free(angles), free(out);
    }
}

// Three rows of one sequence behind the same full pages, each with keys of its own.
static void attention(int is_bf16) {
    static const int groups[] = {1, 3, 7, 13}, dims[] = {16, 48, 80}, fulls[] = {0, 1, 3, 6};
    for (int g = 0; g < 4; g++)
        for (int d = 0; d < 3; d++)
            for (int f = 0; f < 4; f++) {
                enum { PAGES = 12, ROWS = 3 };
                const int group = groups[g], head_dim = dims[d], full = fulls[f];
                const long cache = 2l * PAGES * LANES * head_dim, wide = 2l * ROWS * group * head_dim;
                void *keys = elements(is_bf16, cache, -6, 2), *values = elements(is_bf16, cache, -6, 2);
                void *q = elements(is_bf16, wide, -4, 2), *found = room(4 * wide);
                mg_model model = {.layers = 1, .hidden = 16, .heads = 2 * group, .kv_heads = 2, .head_dim = head_dim};
                model.intermediate = 16, model.is_bf16 = is_bf16, model.vocab = 1, model.max_context = 192;
                model.scale = 0.25f, model.pages = PAGES, model.k_pool = keys, model.v_pool = values;
                int32_t memory[256], ends[10], n = 0, offset = 0;
                for (int part = 0; part < 4; part++)  // tokens, positions, slots, sequence
                    for (int r = 0; r < ROWS; r++) {
                        memory[n++] = part == 1 ? r : 0;
                        ends[part] = n;
                    }
                for (int r = 0; r < ROWS; r++) memory[n++] = full;
                ends[4] = n;
                memory[n++] = 0;
                for (int r = 0; r < ROWS; r++) memory[n++] = offset += 1 + (7 * r + 5 * f) % MAX_TAIL;
                ends[5] = n;
                for (int i = 0; i < offset; i++) memory[n++] = (7 + i / 32) * LANES + (i % 3 ? below(LANES) : i % LANES);
                ends[6] = n;
                memory[n++] = 0;
                memory[n++] = full;
                ends[7] = n;
                for (int p = 0; p < full; p++) memory[n++] = p < 3 ? p + 2 : 9 - p;
                ends[8] = ends[9] = n;
                mg_workspace *ws = mg_workspace_new(&model, 32, 1);
                for (int kv_head = 0; kv_head < 2; kv_head++)
                    good(unit_attend(&model, memory, ends, ws, q, found, 0, ROWS, kv_head));
                add(found, (is_bf16 ? 2 : 4) * wide);
                mg_workspace_free(ws);
                free(keys), free(values), free(q), free(found);
            }
}

static void single_numbers(void) {
    enum { N = 1 << 14 };
    float *x = floats(N, -120, 127), *small = floats(N, -20, 7), *out = room(4 * N);
    bf16 *halves = room(2 * N), *by_one = room(2 * N);
    unit_exp(x, N, out);
    add(out, 4 * N);
    unit_exp(small, N, out);
    add(out, 4 * N);
    for (int i = 0; i + LANES <= N; i += LANES) {
        unit_sum(small + i, out);
        add(out, 4);
    }
    tell("exp and sum");
    uint32_t *any = (uint32_t *)x;
    for (int i = 0; i < N; i++) any[i] = i % 4 ? bits() : (bits() & 0xffff0000u) | 0x8000u;
    unit_to_bf16(x, N, halves, out, by_one);
    add(halves, 2 * N), add(out, 4 * N), add(by_one, 2 * N);
    unit_from_bf16(halves, N, x, out);
    add(x, 4 * N), add(out, 4 * N);
    tell("bfloat16");
    free(x), free(small), free(out), free(halves), free(by_one);
}

static void rows_of_logits(mg_pool *pool) {
    static const int sizes[] = {1, 15, 16, 33, 100, 1000, 4099};
    enum { ROWS = 6 };
    for (int s = 0; s < 7; s++) {
        const int n = sizes[s];
        float *logits = floats((long)ROWS * n, -4, 4);
        logits[5 * n + below(n)] = NAN;
        int32_t index[ROWS] = {0, 1, 2, 3, 4, 5}, out[ROWS], ids[ROWS * MAX_RANKS] = {0}, kept[ROWS];
        float p[ROWS * MAX_RANKS] = {0}, temperature[ROWS], top_p[ROWS], min_p[ROWS];
        double u[ROWS];
        good(mg_argmax(pool, logits, ROWS, n, n, index, ROWS, out));
        add(out, sizeof out);
        const int k = smaller(n, 9);
        good(mg_top_k(pool, logits, ROWS, n, n, k, ids, p));
        add(ids, sizeof ids), add(p, sizeof p);
        for (int turn = 0; turn < 8; turn++) {
            for (int r = 0; r < ROWS; r++) {
                temperature[r] = 0.3f + 0.2f * r, u[r] = bits() / 4294967296.0;
                kept[r] = turn & 1 ? 20 : 0, top_p[r] = turn & 2 ? 0.9f : 1.0f, min_p[r] = turn & 4 ? 0.02f : 0.0f;
            }
            good(mg_sample(pool, logits, ROWS, n, n, index, ROWS, temperature, kept, top_p, min_p, u, out));
            add(out, sizeof out);
        }
        free(logits);
    }
    tell("argmax, top k, draws");
}

static void heads_of(mg_pool *pool, int is_bf16, int is_int8) {
    enum { HEADS = 3, HIDDEN = 64, INNER = 48, IN = 128, DRAFT = 100, PADDED = 112, VOCAB = 150, N = 3, WIDTH = 4 };
    enum { LISTS = 1 + (HEADS - 1) * WIDTH, K = 5 };
    mg_heads heads = {.heads = HEADS, .hidden = HIDDEN, .inner = INNER, .in_size = IN, .draft_vocab_padded = PADDED};
    heads.draft_vocab = DRAFT, heads.vocab = VOCAB, heads.is_bf16 = is_bf16, heads.is_int8 = is_int8;
    heads.embed = elements(is_bf16, VOCAB * HIDDEN, -4, 0), heads.up_bias = floats(HEADS * INNER, -4, 0);
    int32_t ids[DRAFT];
    for (int i = 0; i < DRAFT; i++) ids[i] = (i * 7 + 3) % VOCAB;
    heads.draft_ids = ids;
    const long sizes[] = {HEADS * INNER * IN, HEADS * HIDDEN * INNER, PADDED * HIDDEN};
    mg_int8 eight[3];
    for (int i = 0; i < 3 && is_int8; i++) {
        uint8_t *weights = room(sizes[i]);
        for (long j = 0; j < sizes[i]; j++) weights[j] = (uint8_t)below(256);
        eight[i] = (mg_int8){weights, floats(HEADS * HIDDEN, -9, -7)};
    }
    if (is_int8)
        heads.up8 = eight[0], heads.down8 = eight[1], heads.draft_lm_head8 = eight[2];
    else {
        heads.up = elements(is_bf16, sizes[0], -5, -1), heads.down = elements(is_bf16, sizes[1], -5, -1);
        heads.draft_lm_head = elements(is_bf16, sizes[2], -3, 0);
        void *x_in = elements(is_bf16, N * IN, -3, 1), *x = elements(is_bf16, N * HIDDEN, -3, 1);
        float *logits = room(4 * HEADS * N * PADDED);
        good(mg_heads_logits(pool, &heads, x_in, x, N, logits));
        add(logits, 4 * HEADS * N * PADDED);
    }
    int32_t row[N] = {2, 0, 1}, pending[N] = {5, 77, 149}, tokens[N * LISTS * K] = {0}, under[N * LISTS * K];
    int32_t count[N], first[N], from[N * WIDTH], token[N * WIDTH], list[N * WIDTH];
    float probabilities[N * LISTS * K] = {0}, survival[N * LISTS] = {0};
    mg_follow follow = {.n = N, .lists = LISTS, .k = K, .width = WIDTH, .least = 0.001f, .row = row, .pending = pending};
    follow.tokens = tokens, follow.below = under, follow.probabilities = probabilities, follow.survival = survival;
    follow.count = count, follow.first = first, follow.from = from, follow.token = token, follow.list = list;
    void *hidden = elements(is_bf16, N * HIDDEN, -3, 2);
    good(mg_heads_follow(pool, &heads, &follow, hidden, N, N * WIDTH));
    add(tokens, sizeof tokens), add(under, sizeof under), add(count, sizeof count);
    add(probabilities, sizeof probabilities), add(survival, sizeof survival);
}

static void every_kernel(void) {
    mg_pool *pool = mg_pool_new(2);
    const float_mode before = float_mode_begin();
    static const char *types[] = {"float32", "bfloat16"};
    char name[64];
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
#define TELL(what) snprintf(name, sizeof name, "%s, %s", what, types[is_bf16]), tell(name)
        linear_layers(pool, is_bf16, -10, 3);
        TELL("linear");
        linear_layers(pool, is_bf16, -60, 40);
        TELL("linear over many sizes");
        linear_layers(pool, is_bf16, LEAST, -61);  // so are most sums
        TELL("linear of denormal numbers");
        norms(is_bf16);
        TELL("norms and rotation");
        attention(is_bf16);
        TELL("attention");
        heads_of(pool, is_bf16, 0);
        TELL("heads");
    }
    eight_bits(pool);
    tell("linear, eight bits");
    heads_of(pool, 1, 1);
    tell("heads, eight bits");
    single_numbers();
    rows_of_logits(pool);
    float_mode_end(before);
    mg_pool_free(pool);
}

// --- A recording: numbers of 32 bits, and blocks of bytes after their length.

static FILE *recording;
static int32_t integer(void) {
    int32_t value;
    if (fread(&value, 4, 1, recording) != 1) good("the recording ends early");
    return value;
}
static float real(void) {
    const int32_t value = integer();
    float f;
    memcpy(&f, &value, 4);
    return f;
}
static void *block(size_t *bytes) {
    const size_t size = (size_t)integer();
    void *found = size ? room(size) : NULL;
    if (size && fread(found, 1, size, recording) != size) good("the recording ends early");
    if (bytes) *bytes = size;
    return found;
}
static void compare(const char *what, int count, const void *found) {
    size_t bytes;
    void *expected = block(&bytes);
    printf("%s %d %s\n", what, count, memcmp(found, expected, bytes) ? "DIFFERENT" : "equal");
    free(expected);
}

static void replay(const char *path) {
    if (!(recording = fopen(path, "rb"))) good("the recording can't be read");
    mg_model model = {0};
    int32_t *sizes[] = {&model.layers,       &model.hidden,  &model.heads, &model.kv_heads,   &model.head_dim,
                        &model.intermediate, &model.is_bf16, &model.vocab, &model.max_context};
    for (int i = 0; i < 9; i++) *sizes[i] = integer();
    model.eps = real(), model.scale = real(), model.pages = integer();
    const int max_rows = integer(), units = integer(), size = model.is_bf16 ? 2 : 4;
    mg_layer *layers = room(sizeof(mg_layer) * model.layers);
    for (int l = 0; l < model.layers; l++) {
        layers[l].qkv = block(NULL), layers[l].o = block(NULL), layers[l].gate_up = block(NULL);
        layers[l].down = block(NULL), layers[l].attention_norm = block(NULL), layers[l].mlp_norm = block(NULL);
        layers[l].qkv_bias = block(NULL), layers[l].q_norm = block(NULL), layers[l].k_norm = block(NULL);
    }
    model.layer = layers, model.embed = block(NULL), model.final_norm = block(NULL);
    model.cos = block(NULL), model.sin = block(NULL);
    const void *lm_head = block(NULL);
    const size_t cache = (size_t)model.layers * model.pages * model.kv_heads * model.head_dim * LANES * size;
    model.k_pool = room(cache), model.v_pool = room(cache);
    good(mg_model_fault(&model, max_rows, 2));
    mg_workspace *ws = mg_workspace_new(&model, max_rows, 2);
    mg_pool *pool = mg_pool_new(2);
    void *hidden = room((size_t)max_rows * model.hidden * size);
    float *logits = room(4ul * max_rows * units * LANES);
    for (int call; (call = integer());) {
        size_t bytes;
        int32_t *given = block(&bytes);
        if (call == 1) {
            int32_t *ends = block(NULL);
            good(mg_forward(pool, &model, given, ends, ws, hidden));
            compare("forward", ends[0], hidden);
            free(ends);
        } else if (call == 2) {
            const int rows = (int)(bytes / size / model.hidden);
            good(mg_project(pool, model.is_bf16, 0, given, rows, model.hidden, lm_head, units, logits));
            compare("logits", rows, logits);
        } else {
            const int n = (int)(bytes / 8);
            good(mg_copy_slots(&model, given, given + n, n));
        }
        free(given);
    }
    mg_pool_free(pool);
    mg_workspace_free(ws);
}

const char *mg_variant(int n);

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "variants"))
        for (int n = 0; mg_variant(n); n++) printf("%s\n", mg_variant(n));
    else if (count > 1)
        replay(arguments[1]);
    else
        every_kernel();
    return 0;
}
