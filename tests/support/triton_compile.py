"""Compiles every Triton kernel for GPUs that are not here, and tells what each binary takes.

``python -m tests.support.triton_compile`` prints JSON; with ``--write`` it writes the table in docs/gpu-kernels.md.
Runs in a process of its own, for in one that interprets kernels none can be compiled. ptxas and cuobjdump come with
triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "docs" / "gpu-kernels.md"
CAPABILITIES = (80, 90)
_INSTRUCTIONS = re.compile(r"\b(HGMMA[\w.]*|HMMA[\w.]*|LDL|STL|FFMA\b|LDGSTS[\w.]*)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FLOATS = {
    *("part", "part_o", "part_ml", "cos", "sin", "best", "highest", "temperatures", "cut", "top_ps", "min_ps"),
    *("logits", "values", "tops", "sums", "chances", "repetition", "frequency", "presence"),
}
_OF_THE_MODEL = {
    *("x", "w", "bias", "residual", "out", "table", "weight", "normed", "qkv", "q_norm", "k_norm", "q_out", "q"),
    *("k_pool", "v_pool", "states", "taken"),
}
_WHOLE = {
    *("rows", "N", "K", "stride_x", "stride_out", "H", "stride_qkv", "V", "stride", "BLOCKS", "n"),
}
# Sizes that are multiples of 16 for every model that is run, as Triton finds them when it is launched.
_ALIGNED = {"N", "K", "stride_x", "stride_out", "H", "stride_qkv", "stride", "LAYER"}


def _type(name: str, floats: str) -> str:
    if name in _WHOLE:
        return "i32"
    if name in ("eps", "scale_log2"):
        return "fp32"
    if name == "LAYER":
        return "i64"
    if name in ("keys", "seeds"):
        return "*i64"
    if name in ("prompt", "ending"):
        return "*i8"
    return floats if name in _OF_THE_MODEL else "*fp32" if name in _FLOATS else "*i32"


def variants() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int], str, dict[str, str]]]:
    """Name, kernel, constants, launch options, the model's dtype, and types that a name does not tell."""
    from backends.runners.triton import guesses, ops, penalties, rows, sampling, walk
    from backends.runners.triton.attention import attend_kernel, merge_kernel
    from backends.runners.triton.linear import linear_kernel
    from backends.runners.triton.tiling import GPU

    plain = {"SEG": 4096, "SEGS": 1, "SPLIT": False, "PART": False, "GATED": False}
    plain |= {"SILU": False, "BIAS": False, "RESIDUAL": False}
    chained = {"SEG": 1024, "SEGS": 4, "PART": True}

    def linear(name: str, count: int, dtype: str = "bf16", **changes: Any) -> tuple[Any, ...]:
        constants = {**plain, **changes}
        tile = ops.linear_tile(GPU, count, constants["SEG"], gated=constants["GATED"])
        constants |= {"BR": tile.rows, "BN": tile.columns, "BK": tile.depth}
        return name, linear_kernel, constants, {"num_warps": 4, "num_stages": tile.stages}, dtype, {}

    for count in (16, 32, 64, 128):
        yield linear(f"linear, {count} rows", count)
        yield linear(f"linear, {count} rows, gated", count, GATED=True)
    yield linear("linear, 16 rows, float16", 16, "fp16")
    yield linear("linear, 16 rows, float32", 16, "fp32")
    yield linear("linear, 16 rows, a chain a program", 16, **chained, SPLIT=True)
    yield linear("linear, 64 rows, a chain a program", 64, **chained, SPLIT=True)
    yield linear("linear, 128 rows, all chains", 128, **chained)
    yield linear("linear, 16 rows, bias", 16, BIAS=True)
    yield linear("linear, 16 rows, bias and silu", 16, BIAS=True, SILU=True)
    yield linear("linear, 16 rows, residual", 16, RESIDUAL=True)

    def attend(name: str, dtype: str = "bf16", **changes: Any) -> tuple[Any, ...]:
        constants = {"KV": 8, "GROUP": 4, "D": 128, "SPLITS": 40, "WINDOW": 0, "BM": GPU.queries, "KT": GPU.tile}
        return name, attend_kernel, {**constants, **changes}, {"num_warps": 4, "num_stages": 2}, dtype, {}

    yield attend("attend")
    yield attend("attend, window", WINDOW=4096)
    yield attend("attend, 3 heads of 64", D=64, GROUP=3, KV=3)
    yield attend("attend, float16", "fp16")
    four, eight = {"num_warps": 4}, {"num_warps": 8}
    shape = {"HEADS": 32, "D": 128, "SPLITS": 40, "WINDOW": 0, "PIECE": GPU.piece, "KT": GPU.tile, "HB": GPU.heads}
    yield "merge", merge_kernel, shape, four, "bf16", {}
    rotated = {"HEADS": 32, "KV": 8, "D": 128, "HB": 2 * GPU.heads}
    yield "rotate_store", rows.rotate_store_kernel, {**rotated, "NORM": False}, four, "bf16", {}
    yield "rotate_store, norms", rows.rotate_store_kernel, {**rotated, "NORM": True}, four, "bf16", {}
    yield "add_norm, 4 chains", rows.add_norm_kernel, {"SEGS": 4, "B": 4096}, eight, "bf16", {}
    yield "take", rows.take_kernel, {"B": 4096}, four, "bf16", {}
    yield "copy_slots", rows.copy_slots_kernel, {"KV": 8, "D": 128, "B": 1024}, four, "bf16", {}
    block, drawn = {"B": GPU.vocabulary}, {"token": "*i32"}
    yield "block_best", sampling.block_best_kernel, block, four, "bf16", {}
    yield "best", sampling.best_kernel, {"B": 64}, four, "bf16", drawn
    yield "filter", sampling.filter_kernel, block, eight, "bf16", {}
    yield "race", sampling.race_kernel, block, four, "bf16", {}
    yield "row_key", sampling.row_key_kernel, {"B": 256}, four, "bf16", {"positions": "*i64"}
    yield "walk", walk.walk_kernel, {"DEPTH": 16, "B": 512}, four, "bf16", {}
    committed = {"KV": 8, "D": 128, "DEPTH": 16, "B": 1024}
    yield "commit", walk.commit_kernel, committed, four, "bf16", {}
    of_logits = {"out": "*fp32", "bias": "*fp32"}
    yield "penalise", penalties.penalise_kernel, {"DEPTH": 16, **block}, four, "bf16", of_logits
    yield "head_input", guesses.head_input_kernel, {"TOKEN": True, "B": 4096}, eight, "bf16", {}
    yield "block_top", guesses.block_top_kernel, {"K": 10, **block}, four, "bf16", {}
    yield "top", guesses.top_kernel, {"IDS": True, "K": 10, "B": 256}, four, "bf16", {}


def measure() -> list[dict[str, Any]]:
    """Of each binary: registers, bytes of stack, spilled registers and shared memory, and instructions by kind."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []
    for name, kernel, constants, options, dtype, types in variants():
        types = {arg: types.get(arg, _type(arg, f"*{dtype}")) for arg in kernel.arg_names if arg not in constants}
        signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, arg in enumerate(kernel.arg_names)
            if arg in types and (arg in _ALIGNED or types[arg].startswith("*"))
        }
        for capability in CAPABILITIES:
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            target = GPUTarget("cuda", capability, 32)
            binary: Any = triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})
            found.append({"kernel": name, "sm": capability, **_resources(binary)})
    return found


def _resources(binary: Any) -> dict[str, Any]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    used = _USAGE.search(usage)
    assert used is not None, usage
    registers, stack, _, local = map(int, used.groups())
    instructions = Counter(_INSTRUCTIONS.findall(code))
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": binary.metadata.shared,
        "instructions": dict(sorted(instructions.items())),
    }


def matrix_instructions(measured: dict[str, Any]) -> list[str]:
    return [each for each in measured["instructions"] if "MMA" in each]


def table(measured: list[dict[str, Any]]) -> str:
    """The page that the repository keeps, so that a new version of triton shows in a diff."""
    import triton

    lines = [
        "# What the GPU kernels take",
        "",
        f"Compiled by triton {triton.__version__} without a GPU, by `python -m tests.support.triton_compile --write`; "
        "`make test` compiles them anew and compares. No kernel spills a register or has a stack. Shapes are those of "
        "Llama-3-8B: 32 query and 8 key heads of 128, hidden size 4096.",
        "",
        "| kernel | sm | registers | shared memory, bytes | matrix instructions |",
        "|---|--:|--:|--:|---|",
    ]
    for each in measured:
        families = ", ".join(matrix_instructions(each)) or "-"
        lines.append(f"| {each['kernel']} | {each['sm']} | {each['registers']} | {each['shared']} | {families} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    result = measure()
    if "--write" in sys.argv:
        TABLE.write_text(table(result))
    else:
        print(json.dumps({"measured": result, "table": table(result)}))
