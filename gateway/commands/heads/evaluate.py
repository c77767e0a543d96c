"""``medusa-gateway heads eval``: accuracy, tokens per step and speedup of one or several heads folders."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.commands.engine_options import add_engine_options
from gateway.commands.heads.common import add_model, open_backbone, positive_int, reporting_errors

if TYPE_CHECKING:
    from backends.training.backbone import Backbone
    from backends.training.data.dataset import Answer


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="accuracy, tokens per step and speedup of heads, several side by side",
        description="Top-k accuracy of each head by class and temperature, and tokens per step and expected speedup as "
        "the engine decodes on this device. Give --heads more than once to compare.",
    )
    add_model(parser)
    add = parser.add_argument
    add_engine_options(add, "--device")
    add("--heads", type=Path, action="append", required=True, help="heads folder; may be given several times")
    add("--answers", type=Path, nargs="+", default=[], help="the model's answers: their held-out share is used")
    add(
        "--prompts", type=Path, help="JSON lines with id, prompt and label; default: prompts that come with the program"
    )
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="to decode at; default: 0 0.7")
    add("--per-class", type=positive_int, default=8, help="prompts of each class to decode; default: %(default)s")
    add("--max-new-tokens", type=positive_int, default=128, help="longest answer; default: %(default)s")
    add("--typical", action="store_true", help="what typical acceptance would gain and change")
    add("--measure", type=positive_int, default=0, metavar="ROUNDS", help="also race them against vanilla on the clock")
    add("--report", type=Path, metavar="FILE.html", help="write a report with plots")
    add("--work-dir", type=Path, help="keep the hidden states here; default: a temporary folder")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    def log(line: str) -> None:
        print(line, file=sys.stderr)

    def evaluate() -> None:
        from backends.training.evaluation.assess import AssessOptions, assess
        from backends.training.evaluation.report import assessment_html, assessment_text

        options = AssessOptions(
            temperatures=tuple(dict.fromkeys(args.temperatures)),
            per_class=args.per_class,
            max_new_tokens=args.max_new_tokens,
            typical=args.typical,
            rounds=args.measure,
            seed=args.seed,
        )
        backbone = open_backbone(args, args.device)
        prompts, answers = _prompts_and_answers(args, backbone, log)
        with tempfile.TemporaryDirectory() as scratch:
            work_dir = args.work_dir or Path(scratch)
            assessment = assess(backbone, args.heads, prompts, answers, work_dir, options, log=log)
        if args.report:
            args.report.write_text(assessment_html(assessment))
            log(f"wrote {args.report}")
        print(json.dumps(assessment.to_json()) if args.json else assessment_text(assessment))

    return reporting_errors(evaluate)


def _prompts_and_answers(
    args: argparse.Namespace, backbone: Backbone, log: Callable[[str], object]
) -> tuple[list[Answer], list[Answer]]:
    """What to decode, and what to measure accuracy on; of the latter nothing without ``--answers``."""
    from backends.bench.prompts import PROMPTS
    from backends.training.data.answers import read_prompts
    from backends.training.data.dataset import Answer
    from backends.training.states import held_out_answers

    if args.answers:
        held_out = held_out_answers(backbone, args.answers, log)
        return held_out, held_out
    if args.prompts:
        records = read_prompts(args.prompts)
    else:
        records = [
            {"id": f"{label}/{number}", "label": label, "prompt": text}
            for label, texts in PROMPTS.items()
            for number, text in enumerate(texts)
        ]
    return [
        Answer(
            str(record["id"]),
            record.get("label", ""),
            tuple(backbone.tokenizer.encode_chat([{"role": "user", "content": record["prompt"]}])),
            (),
        )
        for record in records
    ], []
