"""Sizes of tiles and pieces, and what follows from them. Free of triton and torch.

Those that decide in which order a row's numbers are added are part of the arithmetic: a change of them changes bits.
All others only change the speed, which is what the tests hold them to.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that a step is filled up to: each has a CUDA graph of its own."""
_OUTPUTS = (1, 16, 64)
# Programs that fill a large GPU; fewer leave some of it idle while weights are read.
_FULL = 200
MOST_CHAINS = 8


def power_of_two(n: int) -> int:
    """The smallest that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def bucket_of(rows: int, most: int) -> int:
    """Rows of the graph that runs a step of ``rows``, ``most`` being the largest step."""
    return min(next((bucket for bucket in BUCKETS if bucket >= rows), most), most)


def outputs_of(outputs: int, bucket: int) -> int:
    """Rows of that graph whose logits are computed: one of a few numbers, the bucket's own at most."""
    return next((each for each in _OUTPUTS if outputs <= each < bucket), bucket)


@dataclass(frozen=True, slots=True)
class Tiling:
    """``piece``, ``tile``, ``chain_unit`` and ``least_chain`` are part of the arithmetic, all others free.

    ``piece``, ``tile``: keys of a whole piece of attention, and of the steps inside it. A chain of a linear layer has a
    multiple of ``chain_unit`` elements of K, and ``least_chain`` at least. ``queries``: query vectors of one program of
    attention (rows times the query heads of a key head). ``heads``: heads that one program rotates or merges.
    ``columns``, ``depth``: rows of a weight, and elements of K, that one program of a linear layer holds at a time.
    ``vocabulary``: logits that one program of the sampler reads.
    """

    piece: int
    tile: int
    chain_unit: int
    least_chain: int
    queries: int
    heads: int
    columns: int
    depth: int
    vocabulary: int

    def chains(self, n: int, k: int) -> int:
        """Chains that a layer of weight [n, k] is summed in (R3): by its shape, never by the rows."""
        found = 1
        while (
            found < MOST_CHAINS
            and -(-n // self.columns) * found < _FULL
            and k % (2 * found * self.chain_unit) == 0
            and k // (2 * found) >= self.least_chain
        ):
            found *= 2
        return found

    def pieces(self, n: int, window: int = 0) -> list[tuple[int, int, int]]:
        """Of a row that sees ``n`` keys, itself the last: start, end and number of each piece (R4).

        Whole pieces, then the whole tiles after them, then the rest. ``window``: keys that the row sees at most, 0 for
        all; pieces that lie before it are left out.
        """
        whole, tiles = n // self.piece, n // self.tile * self.tile
        found = [(i * self.piece, (i + 1) * self.piece, i) for i in range(whole)]
        if tiles > whole * self.piece:
            found.append((whole * self.piece, tiles, whole))
        if n > tiles:
            found.append((tiles, n, whole + 1))
        return [piece for piece in found if not window or piece[1] > n - window]

    def splits(self, longest: int) -> int:
        """Numbers that the pieces of rows of at most ``longest`` keys can have."""
        return longest // self.piece + 2

    def depth_of(self, chain: int, most: int) -> int:
        """Elements of K in one step of a linear layer: they divide the chain."""
        return min(chain & -chain, most)


GPU = Tiling(
    piece=256,
    tile=64,
    chain_unit=64,
    least_chain=1024,
    queries=64,
    heads=4,
    columns=64,
    depth=128,
    vocabulary=2048,
)
INTERPRETER = Tiling(
    piece=64,
    tile=32,
    chain_unit=16,
    least_chain=32,
    queries=16,
    heads=8,
    columns=128,
    depth=128,
    vocabulary=512,
)
"""Pieces and chains that short prompts and small models reach, and few programs: the interpreter takes milliseconds
for each."""
