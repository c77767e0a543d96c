"""`medusa-gateway classify`: the class of a prompt, or of each line of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.commands.errors import CommandError

if TYPE_CHECKING:
    from gateway.classifier import PromptClassifier


def add_parser(subparsers: Any) -> None:
    """Registers `classify`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "classify",
        help="say whether a prompt asks for code, chat or creative writing",
        description="Classifies one prompt, or every line of a JSON lines file.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("text", nargs="?", metavar="TEXT", help="the prompt")
    what.add_argument(
        "--jsonl", metavar="FILE", help='lines of {"prompt": ...} or {"messages": [...]}; - reads standard input'
    )
    parser.add_argument(
        "--json", action="store_true", help="print label, probabilities and the features that spoke for it as JSON"
    )
    parser.add_argument(
        "--artifact", type=Path, metavar="FILE", help="a classifier of your own (default: the built-in one)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the class. Raises CommandError when the input can't be used."""
    from gateway.classifier import ArtifactError, PromptClassifier
    from gateway.classifier.training.dataset import DataError

    try:
        classifier = PromptClassifier.load(args.artifact)
        if args.jsonl is not None:
            _classify_lines(classifier, args.jsonl)
        else:
            _classify_text(classifier, args.text, args.json)
    except (ArtifactError, DataError) as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:
        # The reader (such as `head`) has seen enough; a closed stdout must not fail again at exit.
        sys.stdout = None
    return 0


def _classify_text(classifier: PromptClassifier, text: str, as_json: bool) -> None:
    result = classifier.classify(text)
    features = result.explain()
    if as_json:
        out = result.as_dict() | {"features": [{"feature": f.feature, "score": f.score} for f in features]}
        print(json.dumps(out, ensure_ascii=False))
        return
    print(f"{result.label}{' (uncertain)' if result.uncertain else ''}")
    for label, probability in sorted(result.probabilities.items(), key=lambda pair: -pair[1]):
        print(f"  {label:<10} {probability:.3f}")
    if features:
        print("spoke for it: " + "; ".join(f.feature for f in features))


def _classify_lines(classifier: PromptClassifier, name: str) -> None:
    from gateway.classifier.training.dataset import read_prompts

    for prompt in read_prompts("standard input" if name == "-" else name, _lines(name)):
        print(json.dumps(classifier.classify(prompt).as_dict(), ensure_ascii=False))


def _lines(name: str) -> Iterator[bytes]:
    from gateway.classifier.training.dataset import DataError

    if name == "-":
        yield from sys.stdin.buffer
        return
    try:
        with open(name, "rb") as file:
            yield from file
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}; give a readable JSON lines file or -") from error
