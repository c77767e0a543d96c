"""``medusa-gateway heads refresh``: heads for an updated model, from those of the model before."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.commands.heads.common import (
    add_cleaning,
    add_model,
    cleaning_options,
    log_of,
    open_backbone,
    positive_int,
    reporting_errors,
)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "refresh",
        help="train heads on for an updated model: a short run on a sample",
        description="Have the updated model answer a sample of prompts, train its old heads on with that for a short "
        "while, and print tokens per step before and after.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--heads", type=Path, required=True, help="folder of the old heads")
    add("--prompts", type=Path, help="JSON lines with id, prompt and (optional) label")
    add("--answers", type=Path, nargs="+", default=[], help="the updated model's answers, instead of --prompts")
    add("--out", type=Path, required=True, help="folder for the new heads")
    add("--work-dir", type=Path, help="answers, states and checkpoints; default: OUT.work")
    add(
        "--sample",
        type=positive_int,
        default=400,
        help="prompts to take, a fifth of them for the evaluation; %(default)s",
    )
    add("--epochs", type=positive_int, default=2, help="default: %(default)s")
    add("--lr", type=float, default=1e-3, help="peak learning rate; default: %(default)s")
    add("--max-new-tokens", type=positive_int, default=192)
    add_cleaning(parser)
    add("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from backends.training.distill import TrainingRun
    from backends.training.refresh import refresh_heads
    from backends.training.trainer import TrainingOptions
    from backends.training.workers import joined_workers

    run = TrainingRun(
        prompts=args.prompts,
        answers=tuple(args.answers),
        out=args.out,
        work_dir=args.work_dir or args.out.with_name(args.out.name + ".work"),
        options=TrainingOptions(seed=args.seed),
        initial=args.heads,
        max_new_tokens=args.max_new_tokens,
        command=shlex.join(["medusa-gateway", *sys.argv[1:]]),
        cleaning=cleaning_options(args),
    )

    def refresh() -> None:
        with joined_workers() as workers:
            refresh_heads(
                open_backbone(args, str(workers.device)),
                replace(run, workers=workers),
                sample=args.sample,
                epochs=args.epochs,
                learning_rate=args.lr,
                log=log_of(workers),
            )

    return reporting_errors(refresh)
