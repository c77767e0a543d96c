"""``medusa-gateway verify-lossless``: prove on this machine that speculation changes neither tokens nor logits."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from typing import Any

from gateway.commands.engine_options import add_engine_options
from gateway.commands.errors import CommandError

_MOST_SHOWN = 5
_STRAINED = {
    "cached": "prompt tokens from the cache",
    "preemptions": "preemptions",
    "evictions": "evictions",
    "aborts": "aborts",
}


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify-lossless",
        help="compare speculative with vanilla decoding, bit by bit",
        description="Decode random prompts alone and vanilla, then with random trees in random batches, greedy and "
        "sampled; compare tokens and logits bitwise, and the text with the decoded tokens. Exits 1 on any difference.",
    )
    add = parser.add_argument
    add_engine_options(add, "--model", "--heads")
    add("--tiny", action="store_true", help="a random 2-layer model instead, for many prompts in little time")
    add(
        "--architecture",
        metavar="NAME",
        help="with --tiny: the random model's architecture (gemma2, phi, gpt-neox, ...), or 'all', one after another",
    )
    add(
        "--tokenizer",
        metavar="KIND",
        help="with --tiny: the shape of its tokenizer (byte-level, byte-fallback, llama3), or 'all', one after another",
    )
    add("--prompts", type=int, metavar="N", help="prompts per dtype; default: 200, with --tiny 5000")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default: 24, with --grammar 160")
    add(
        "--grammar",
        action="store_true",
        help="most answers must follow a random schema, pattern, choice or grammar, and are checked against it too",
    )
    add(
        "--prefix-cache",
        action="store_true",
        help="most prompts begin like others, and what is computed of their beginnings is shared",
    )
    add(
        "--pages",
        type=int,
        metavar="N",
        help="so few pages of 16 tokens (or what the longest answer needs) that sequences lose theirs and go on later",
    )
    add("--dtype", choices=("both", "bfloat16", "float32"), default="both", help="default: %(default)s")
    add_engine_options(add, "--device", "--runner", "--quantize")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from backends.proof.grammars import can_validate
    from backends.proof.lossless import Strain
    from backends.proof.setup import architectures, prove, tokenizers

    if args.architecture and not args.tiny:
        raise CommandError("--architecture goes with --tiny: a real model has its own")
    if args.tokenizer and not args.tiny:
        raise CommandError("--tokenizer goes with --tiny: a real model has its own")
    dtypes = ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,)
    prompts = args.prompts or (5000 if args.tiny else 200)
    if args.pages is not None and args.pages < 1:
        raise CommandError("--pages must be at least 1")
    strain = Strain(cache=args.prefix_cache, pages=args.pages)
    strained = tuple(_STRAINED) if strain else ()
    parts = {}
    try:
        for architecture, tokenizer, dtype in product(
            architectures(args.architecture), tokenizers(args.tokenizer), dtypes
        ):
            name = " ".join(each for each in (architecture, tokenizer, dtype) if each)
            parts[name] = prove(
                model=args.model,
                heads=args.heads,
                tiny=args.tiny,
                architecture=architecture,
                tokenizer=tokenizer,
                quantize=args.quantize,
                dtype=dtype,
                device=args.device,
                runner=args.runner,
                prompts=prompts,
                max_tokens=args.max_tokens or (160 if args.grammar else 24),
                grammar=args.grammar,
                strain=strain,
                seed=args.seed,
                progress=lambda done, total, name=name: _progress(name, done, total),
            )
    except ValueError as error:
        raise CommandError(str(error)) from error
    keys = ("prompts", "tokens", "token_mismatches", "logit_mismatches", "text_mismatches", *strained)
    total = {key: sum(getattr(part, key) for part in parts.values()) for key in keys}
    invalid = [wrong for part in parts.values() for wrong in part.invalid]
    if args.grammar:
        total |= {"whole_answers": sum(part.whole for part in parts.values()), "invalid_answers": len(invalid)}
        total["validated_by_jsonschema"] = can_validate()
    for wrong in invalid[:_MOST_SHOWN]:
        print(f"an answer breaks its grammar: {wrong}", file=sys.stderr)
    if args.json:
        detail = {
            name: {**{key: getattr(part, key) for key in keys}, "accepted_draft_tokens": part.accepted}
            for name, part in parts.items()
        }
        print(json.dumps({**total, "by_dtype": detail}))
    else:
        for name, part in parts.items():
            print(
                f"{name}: {part.prompts} prompts, {part.tokens} tokens, {part.accepted} draft tokens accepted, "
                f"{part.token_mismatches} token mismatches, {part.logit_mismatches} logit mismatches, "
                f"{part.text_mismatches} text mismatches"
                + "".join(f", {getattr(part, key)} {_STRAINED[key]}" for key in strained)
                + (f", {part.whole} whole answers, {len(part.invalid)} invalid" if args.grammar else "")
            )
        if args.grammar and not can_validate():
            print("documents were only parsed: jsonschema is not installed")
    return 0 if all(part.lossless for part in parts.values()) else 1


def _progress(dtype: str, done: int, total: int) -> None:
    if sys.stderr.isatty() and (done % 10 == 0 or done == total):
        print(f"\r{dtype}: {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
