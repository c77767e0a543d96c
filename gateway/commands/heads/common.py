"""What the subcommands of ``medusa-gateway heads`` have in common: the model, cleaning, errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.commands.engine_options import add_engine_options
from gateway.commands.errors import CommandError

if TYPE_CHECKING:
    from backends.training.backbone import Backbone
    from backends.training.data.cleaning import CleaningOptions
    from backends.training.workers import Workers


def add_model(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser.add_argument, "--model")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: all")


def positive_int(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def add_cleaning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--min-tokens", type=int, default=8, help="shorter answers are not trained on; default: %(default)s")
    add("--max-repetition", type=float, default=0.6, help="nor are those with a larger share of repeated 4-grams")
    add("--balance", type=float, default=4.0, help="most answers of a class for one of the smallest class; 0: any")


def cleaning_options(args: argparse.Namespace) -> CleaningOptions:
    from backends.training.data.cleaning import CleaningOptions

    return CleaningOptions(args.min_tokens, args.max_repetition, args.balance)


def open_backbone(args: argparse.Namespace, device: str = "cpu") -> Backbone:
    from backends.training.backbone import load_backbone

    return load_backbone(args.model, threads=args.threads, device=device)


def log_of(workers: Workers) -> Callable[[str], object]:
    return print if workers.is_main else lambda line: None


def reporting_errors(work: Callable[[], object]) -> int:
    """Run ``work``; 0. Raises CommandError for a mistake in the input."""
    from backends.heads.module import HeadsError
    from backends.models.demo import DemoModelError
    from backends.training.checkpoint import TrainingError
    from backends.training.data.dataset import AnswersError

    try:
        work()
    except (AnswersError, TrainingError, HeadsError, DemoModelError) as error:
        raise CommandError(str(error)) from error
    return 0
