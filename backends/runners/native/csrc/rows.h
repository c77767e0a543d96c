// A step's rows in flat arrays; BatchBuilder in backends/runners/batch.py does the same, and is what this is tested
// against. Plain C for any CPU, called without Python's lock.
#pragma once
#include <stdint.h>
#include <string.h>

enum { ROWS_CHUNK, ROWS_CHUNK_WITH_OUTPUT, ROWS_TREE };

typedef struct {
    int32_t kind, position, rows, pages;
} mg_rows_of;

// The tail of a certain row: what its last page holds up to and with itself.
static int32_t rows_tail(int32_t *tail, const int32_t *pages, int32_t full, int32_t offset, int32_t page_size) {
    for (int32_t i = 0; i < offset; i++) tail[i] = pages[full] * page_size + i;
    return offset;
}

// Fills `memory` with the arrays of StepBatch one behind the other, and `ends` [10] with where each of them ends.
//
// of [sequences]; tokens: of all rows; parents: of all candidates, as rows of their sequence; pages: the page tables one
// behind the other. Candidates get slots from `scratch_base` on. Returns 0 when `capacity` ints are too few, or a
// sequence lacks pages, or a parent is no earlier row.
int mg_rows(const mg_rows_of *of, int32_t sequences, const int32_t *tokens, const int32_t *parents,
            const int32_t *pages, int32_t rows, int32_t page_size, int32_t scratch_base, int32_t *memory,
            int32_t capacity, int32_t *ends) {
    int32_t *position = memory + rows, *slot = position + rows, *sequence = slot + rows, *full = sequence + rows;
    int32_t *tail_offset = full + rows, *tail = tail_offset + rows + 1;
    int64_t fixed = 6 * (int64_t)rows + 1 + sequences + 1, all_pages = 0;
    for (int32_t s = 0; s < sequences; s++) all_pages += of[s].pages;
    // Every row may be an output.
    int64_t room = capacity - fixed - all_pages - rows, used = 0;
    if (room < 0) return 0;
    memcpy(memory, tokens, (size_t)rows * sizeof(int32_t));
    tail_offset[0] = 0;
    int32_t row = 0, node = 0;
    const int32_t *table = pages;
    for (int32_t s = 0; s < sequences; table += of[s++].pages) {
        const int32_t first = row, certain = of[s].kind == ROWS_TREE ? 1 : of[s].rows;
        if (of[s].position < 0 || (of[s].position + certain - 1) / page_size >= of[s].pages) return 0;
        for (; row < first + certain; row++) {
            const int32_t at = of[s].position + row - first;
            position[row] = at;
            slot[row] = table[at / page_size] * page_size + at % page_size;
            sequence[row] = s;
            full[row] = (at + 1) / page_size;
            if (used + page_size > room) return 0;
            used += rows_tail(tail + used, table, full[row], (at + 1) % page_size, page_size);
            tail_offset[row + 1] = used;
        }
        const int32_t shared = (of[s].position + 1) % page_size;
        for (; row < first + of[s].rows; row++) {
            const int32_t parent = parents[node];
            if (parent < 0 || parent >= row - first) return 0;
            // What its parent sees, and itself.
            const int32_t begin = tail_offset[first + parent], seen = tail_offset[first + parent + 1] - begin;
            if (used + seen + 1 > room) return 0;
            memcpy(tail + used, tail + begin, (size_t)seen * sizeof(int32_t));
            used += seen;
            tail[used++] = slot[row] = scratch_base + node++;
            position[row] = of[s].position + seen - shared + 1;
            sequence[row] = s;
            full[row] = full[first];
            tail_offset[row + 1] = used;
        }
    }
    int32_t *page_offset = tail + used, *page = page_offset + sequences + 1, *out = page + all_pages;
    page_offset[0] = 0;
    for (int32_t s = 0; s < sequences; s++) page_offset[s + 1] = page_offset[s] + of[s].pages;
    memcpy(page, pages, (size_t)all_pages * sizeof(int32_t));
    int32_t outputs = 0;
    for (int32_t s = 0, at = 0; s < sequences; at += of[s++].rows) {
        if (of[s].kind == ROWS_TREE)
            for (int32_t i = 0; i < of[s].rows; i++) out[outputs++] = at + i;
        else if (of[s].kind == ROWS_CHUNK_WITH_OUTPUT)
            out[outputs++] = at + of[s].rows - 1;
    }
    const int32_t *end[] = {position, slot, sequence, full, tail_offset, tail, page_offset, page, out, out + outputs};
    for (int i = 0; i < 10; i++) ends[i] = end[i] - memory;
    return 1;
}
