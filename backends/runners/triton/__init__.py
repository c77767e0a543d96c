"""Models on a GPU through kernels written in Triton: the same bits for a row in any batch, tree and prompt chunk.

The rules that make it so, which each kernel's docstring names (docs/gpu.md says what was proven of them, and how):

- R1: one family of matrix instructions for a dtype and a device. Weights are the side that is 64 rows or more.
- R2: products are summed along K in ascending order, 16 at a time, in one accumulator.
- R3: long sums are cut into chains by the weight's shape alone, and chains are added in ascending order.
- R4: attention is cut into pieces by a row's own length alone, and pieces are merged in ascending order.
- R5: all else is done row by row, by one binary for any number of rows, with constant block sizes and no contraction.
- R6: drawing has no sums of floats: maxima, and integers. What a masked load would read never counts.
- R7: rows that fill a bucket write into a slot that nobody reads; no kernel looks at the number of rows but for masks.
"""
