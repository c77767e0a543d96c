"""`medusa-gateway classifier`: train, evaluate and time prompt classifiers."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.commands.errors import CommandError

if TYPE_CHECKING:
    from gateway.classifier.training.dataset import Example

BENCH_LENGTHS = (0, 200, 1_000, 2_000, 4_000, 8_000)
BENCH_HUGE = 1_000_000
_LOOP_TABLE = {number: number for number in range(0, 1024, 2)}


def add_parser(subparsers: Any) -> None:
    """Registers `classifier train`, `classifier eval` and `classifier bench`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "classifier", help="train, evaluate and time the prompt classifier"
    )
    commands = parser.add_subparsers(dest="classifier_command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a classifier on labelled prompts")
    _data_options(train, required=True)
    train.add_argument(
        "--out",
        type=Path,
        default=Path("classifier"),
        metavar="DIR",
        help="where artifact and card go (default: classifier)",
    )
    train.set_defaults(run=run_train)

    evaluate = commands.add_parser("eval", help="score on unseen sources and languages, beside a TF-IDF baseline")
    _data_options(evaluate, required=True)
    evaluate.add_argument(
        "--card", type=Path, metavar="DIR", help="write the tables into the card of the artifact in DIR"
    )
    evaluate.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="a checkout of an earlier version, to score in the same run in place of the baselines",
    )
    evaluate.set_defaults(run=run_eval)

    bench = commands.add_parser("bench", help="print the latency of classifying, by prompt length")
    bench.add_argument("--data", type=Path, metavar="FILE", help="prompts to time (default: generated ones)")
    bench.add_argument(
        "--artifact", type=Path, metavar="FILE", help="a classifier of your own (default: the built-in one)"
    )
    bench.add_argument("--count", type=int, default=500, metavar="N", help="prompts a length (default: 500)")
    bench.set_defaults(run=run_bench)


def _data_options(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--data", type=Path, required=required, metavar="FILE", help='JSON lines of {"prompt" or "messages", "label"}'
    )
    parser.add_argument(
        "--generated",
        type=int,
        metavar="N",
        help="generated prompts to add (default: many for the built-in labels, none for others)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated prompts (default: 0)")


def _need_scikit_learn(command: str) -> None:
    """It comes with the extra `train`: serving reads arrays and has no use for it."""
    if any(find_spec(name) is None for name in ("sklearn", "scipy")):
        raise CommandError(
            f"`classifier {command}` needs scikit-learn; install it with: pip install 'medusa-gateway[train]'"
        )


def run_train(args: argparse.Namespace) -> int:
    """Trains, then writes artifact and card."""
    _need_scikit_learn("train")
    from gateway.classifier.model import save_arrays
    from gateway.classifier.training.card import ARTIFACT_NAME, facts, write_card
    from gateway.classifier.training.dataset import DataError
    from gateway.classifier.training.fit import is_generated, train

    try:
        examples = _examples(args)
        generated = sum(map(is_generated, examples))
        print(
            f"training on {len(examples) - generated} prompts of {args.data} and {generated} generated ones",
            file=sys.stderr,
        )
        arrays = train(examples, facts(examples))
        args.out.mkdir(parents=True, exist_ok=True)
        save_arrays(arrays, args.out / ARTIFACT_NAME)
        card = write_card(arrays, args.out)
    except DataError as error:
        raise CommandError(str(error)) from error
    size = (args.out / ARTIFACT_NAME).stat().st_size
    print(
        f"{args.out / ARTIFACT_NAME}: labels {', '.join(arrays.labels)}; {len(arrays.keys)} features,"
        f" {size / 1e6:.1f} MB; card {card}"
    )
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Prints the tables; with --card also writes them into the card."""
    _need_scikit_learn("eval")
    from gateway.classifier.model import ArtifactError, load_arrays
    from gateway.classifier.training.card import ARTIFACT_NAME, write_card
    from gateway.classifier.training.dataset import DataError
    from gateway.classifier.training.evaluation import evaluate

    try:
        arrays = load_arrays(args.card / ARTIFACT_NAME) if args.card is not None else None
        report = evaluate(_examples(args), lambda step: print(step, file=sys.stderr), args.before)
        tables = report.markdown()
        print(tables)
        if arrays is not None and args.card is not None:
            write_card(arrays, args.card, tables)
    except (DataError, ArtifactError) as error:
        raise CommandError(str(error)) from error
    return 0


def _examples(args: argparse.Namespace) -> list[Example]:
    from gateway.classifier.training.dataset import DataError, read_examples
    from gateway.classifier.training.fit import with_generated

    if args.generated is not None and args.generated < 0:
        raise DataError(f"--generated {args.generated}: give 0 or more")
    return with_generated(read_examples(args.data), args.generated, args.seed)


def run_bench(args: argparse.Namespace) -> int:
    """Prints p50 and p99 of wall time and of this thread's CPU time, which other processes disturb less."""
    from gateway.classifier import ArtifactError, PromptClassifier
    from gateway.classifier.training.dataset import DataError, read_examples
    from gateway.classifier.training.generator import PromptGenerator

    if args.count < 1:
        raise CommandError(f"--count {args.count}: give at least 1")
    try:
        examples = read_examples(args.data) if args.data is not None else PromptGenerator().generate(2_000)
        started = time.perf_counter()
        classifier = PromptClassifier.load(args.artifact)
    except (DataError, ArtifactError) as error:
        raise CommandError(str(error)) from error
    print(f"load {1e3 * (time.perf_counter() - started):.0f} ms\n")
    print(
        "| characters | prompts | p50 ms | p99 ms | CPU p50 ms | CPU p99 ms | p50 / loop | p99 / loop |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    texts = [example.text() for example in examples]
    for length in (*BENCH_LENGTHS, BENCH_HUGE):
        count = args.count if length < BENCH_HUGE else 20
        prompts = _prompts_of(texts, length, count)
        for prompt in prompts[:50]:
            classifier.classify(prompt)
        wall, cpu, loop = [], [], []
        for prompt in prompts:
            wall_start, cpu_start = time.perf_counter(), time.thread_time()
            classifier.classify(prompt)
            cpu.append(time.thread_time() - cpu_start)
            wall.append(time.perf_counter() - wall_start)
            # In turns with what is measured, so that a slow moment of the machine falls on both.
            loop_start = time.thread_time()
            _reference_loop()
            loop.append(time.thread_time() - loop_start)
        unit = _quantile(loop, 0.5)
        cells = [f"{1e3 * _quantile(times, q):.3f}" for times in (wall, cpu) for q in (0.5, 0.99)]
        cells += [f"{_quantile(cpu, q) / unit:.2f}" for q in (0.5, 0.99)]
        print(f"| {length or 'as they are'} | {len(prompts)} | " + " | ".join(cells) + " |")
        if not length:
            print(f"reference loop: {1e3 * unit:.3f} ms of CPU", file=sys.stderr)
    return 0


def _reference_loop() -> int:
    """A fixed piece of plain Python, about what classifying does: look-ups and sums. The unit of relative figures."""
    table, total = _LOOP_TABLE, 0
    for number in range(2_000):
        total += table.get(number & 1023, 0)
    return total


def _prompts_of(texts: list[str], length: int, count: int) -> list[str]:
    """Prompts of exactly `length` characters, made of whole ones in a row; 0 leaves them as they are."""
    if not length:
        return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]
    prompts = []
    for number in range(count):
        at, parts, size = number * 31, [], 0
        while size < length:
            part = texts[at % len(texts)] or " "
            parts.append(part)
            size += len(part) + 1
            at += 1
        prompts.append("\n".join(parts)[:length])
    return prompts


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]
