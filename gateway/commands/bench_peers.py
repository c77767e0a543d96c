"""Options of ``bench peers``, ``bench prompts`` and ``bench load``, and what they do."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_ONLY = {
    "contestants": ("peers", "load"),
    "classes": ("peers",),
    "cpu": ("peers", "load"),
    "prompts": ("peers",),
    "seconds": ("peers", "load"),
    "temperature": ("decoding",),
    "source": ("prompts",),
    "out": ("prompts",),
    "rates": ("load",),
    "target": ("load",),
}
"""Of which ``bench``."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="of prompts only: a file, or an http(s) address")
    add = parser.add_argument_group("of bench peers, bench load and bench prompts only").add_argument
    add("--contestants", type=_names, metavar="NAME,NAME", help="of peers: see docs/benchmarks.md; of load: servers")
    add("--classes", type=_names, metavar="NAME,NAME", help="of peers: classes of prompts; default: all")
    add("--prompts", metavar="FILE", help="of peers: JSON lines with category and text; default: the project's own")
    add("--seconds", type=float, metavar="N", help="of peers: begin no round that would end later; of load: by server")
    add("--cpu", choices=("native", "avx2"), help="of peers, load: instructions that all may use; default: native")
    add("--rates", type=_rates, metavar="R,R", help="of load: requests a second that arrive; default: 1,2,4")
    add("--target", type=_target, metavar="TTFT,TPOT", help="of load: milliseconds that count as good; default: 500,50")
    add("--out", metavar="FILE", help="of prompts: where to write them; default: standard output")


def misplaced(args: argparse.Namespace) -> str | None:
    """Which option belongs to another ``bench``, in words."""
    for name, owners in _ONLY.items():
        if getattr(args, name) is not None and args.what not in owners:
            flag = "SOURCE" if name == "source" else f"--{name}"
            return f"{flag} is only for bench {' and bench '.join(owners)}, not for bench {args.what}"
    return None


def run_peers_command(args: argparse.Namespace, progress: Any) -> int:
    """Raises ValueError for what the user can mend."""
    from backends.bench.peers.bench import PeersOptions, PeersRequest, choose, run_peers
    from backends.bench.peers.report import table
    from backends.bench.prompt_files import parse_prompts
    from backends.bench.prompts import PROMPTS

    for flag in ("runner", "device"):
        if getattr(args, flag) != "auto":
            raise ValueError(f"--{flag} is not for bench peers, which runs everybody on the CPU as they come")
    if args.quantize is not None:
        raise ValueError("--quantize is not for bench peers: the contestant int8 has eight-bit weights")
    texts: dict[str, Any] = dict(PROMPTS)
    if args.prompts is not None:
        texts = dict(parse_prompts(Path(args.prompts).read_bytes(), args.prompts))
    if args.classes is not None:
        if unknown := [name for name in args.classes if name not in texts]:
            raise ValueError(f"there are no prompts of class {unknown[0]!r}; there are: {', '.join(texts)}")
        texts = {name: texts[name] for name in args.classes}
    options = choose(
        PeersOptions.quick() if args.quick else PeersOptions(),
        contestants=args.contestants,
        concurrencies=args.concurrency,
        rounds=args.rounds,
        max_tokens=args.max_tokens,
        seconds=args.seconds,
    )
    request = PeersRequest(
        options,
        model=args.model,
        heads=args.heads,
        dtype=None if args.dtype == "auto" else args.dtype,
        cpu=args.cpu or "native",
        prompts=texts,
    )
    report = run_peers(request, progress)
    if args.json:
        print(json.dumps(report))
        return 0
    print("machine: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(f"{report['model']}, {report['rounds']} rounds, answers of {report['max_tokens']} tokens, {report['date']}")
    for name, facts in report["contestants"].items():
        print(f"{name}: {facts['version']}")
    print(table(report))
    return 0


def run_load_command(args: argparse.Namespace, progress: Any) -> int:
    """Raises ValueError for what the user can mend."""
    from backends.bench.peers.bench import PeersOptions, PeersRequest, place_of
    from backends.runners.cpu_cores import cpu_name
    from gateway.bench.http_load import LoadOptions, run_http_load

    place = place_of(PeersRequest(PeersOptions(), model=args.model, cpu=args.cpu or "native"), progress)
    usual = LoadOptions()
    options = LoadOptions(
        args.contestants or usual.servers,
        args.rates or usual.rates,
        args.target or usual.target_ms,
        args.max_tokens or usual.max_tokens,
        args.seconds or usual.seconds,
    )
    if unknown := [name for name in options.servers if name not in usual.servers]:
        raise ValueError(f"bench load has no server {unknown[0]!r}; there are: {', '.join(usual.servers)}")
    machine = {"cpu": cpu_name(), "threads": place.threads, "instructions": place.cpu}
    report = {"machine": machine, "model": place.model.name, **run_http_load(options, place, progress)}
    if args.json:
        print(json.dumps(report))
        return 0
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    columns = list(report["cells"][0]) if report["cells"] else []
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for cell in report["cells"]:
        print("| " + " | ".join(str(cell[column]) for column in columns) + " |")
    for name, reason in report["skipped"].items():
        print(f"left out: {name}: {reason}")
    return 0


def run_prompts_command(args: argparse.Namespace) -> int:
    """Raises ValueError for a source that can't be read as prompts."""
    from backends.bench.prompt_files import format_prompts, parse_prompts, read_source

    if args.source is None:
        raise ValueError("bench prompts wants a SOURCE: a file, or an http(s) address, with JSON lines of prompts")
    prompts = parse_prompts(read_source(args.source), args.source)
    if args.out is None:
        sys.stdout.write(format_prompts(prompts))
    else:
        Path(args.out).write_text(format_prompts(prompts), encoding="utf-8")
        counts = ", ".join(f"{category} {len(texts)}" for category, texts in prompts.items())
        print(f"{args.out}: {counts}; measure with: medusa-gateway bench peers --prompts {args.out}")
    return 0


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different names such as vanilla,llama-bf16")
    return names


def _rates(text: str) -> tuple[float, ...]:
    return _positive(text, "a list of requests a second such as 1,2,4")


def _target(text: str) -> tuple[float, ...]:
    found = _positive(text, "two times in milliseconds such as 500,50")
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two times in milliseconds such as 500,50")
    return found


def _positive(text: str, wanted: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < value < float("inf") for value in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return found
