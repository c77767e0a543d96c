"""``medusa-gateway policy``: check, explain and compare policy files, and print their schema. Needs no gateway."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from gateway.commands.errors import CommandError
from gateway.commands.validating import read_input, validate_files

if TYPE_CHECKING:
    from policy.spec import PolicySpec


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "policy", help="check, explain and compare decoding policies", description="Work with policy files."
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    validate = actions.add_parser("validate", help="check files; status 1 if any is refused")
    validate.add_argument("files", nargs="+", metavar="FILE", help="- for standard input")
    validate.set_defaults(run=run_validate)

    explain = actions.add_parser(
        "explain",
        help="print what a policy decides for a request",
        description="Decides as a gateway without statistics would. To ask a running one, which has them: "
        "POST /v1/decoding/explain.",
    )
    add = explain.add_argument
    add("--policy", metavar="FILE", help="default: the policy that ships with the gateway")
    add("--class", dest="class_name", default="unclassified", metavar="NAME", help="default: %(default)s")
    add("--model", default="model", metavar="NAME", help="default: %(default)s")
    add("--tenant", default="", metavar="NAME", help="name of the API key")
    add("--turn", choices=("first", "later"), default="first", help="default: %(default)s")
    add("--prompt-tokens", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, metavar="T", help="default: the client names none")
    add("--load", type=float, default=0.0, metavar="X", help="sequences over those that can run; default: %(default)s")
    add("--heads", type=int, default=4, metavar="N", help="Medusa heads of the model; default: %(default)s")
    add("--request-id", default="explain", metavar="ID", help="decides whether the request is in the control group")
    add("--json", action="store_true", help="print everything as JSON")
    explain.set_defaults(run=run_explain)

    schema = actions.add_parser("schema", help="print the JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)

    diff = actions.add_parser("diff", help="print what changes for requests; status 1 if anything does")
    diff.add_argument("before", metavar="A")
    diff.add_argument("after", metavar="B")
    diff.set_defaults(run=run_diff)


def run_validate(args: argparse.Namespace) -> int:
    def summary(name: str) -> str:
        spec = _load(name)
        return f"version {spec.version}, {len(spec.rules)} rules, {len(spec.classes)} classes"

    return validate_files(args.files, summary)


def run_explain(args: argparse.Namespace) -> int:
    from policy.decision import decide
    from policy.spec import RequestFacts
    from policy.statistics.snapshot import LiveStats

    facts = RequestFacts(
        request_id=args.request_id,
        model=args.model,
        class_name=args.class_name,
        tenant=args.tenant,
        turn=args.turn,
        prompt_tokens=args.prompt_tokens,
        temperature=args.temperature,
        load=args.load,
        model_heads=args.heads,
    )
    decision = decide(_loaded(args.policy), LiveStats(), facts, now=0.0)
    if args.json:
        print(json.dumps(decision.as_dict(), indent=2))
        return 0
    tree = "planned every step" if decision.tree is None else f"{len(decision.tree)} nodes, given"
    shape = f", {decision.num_heads} heads, up to {decision.max_nodes} nodes, tree {tree}"
    print(f"{decision.method}{shape if decision.method == 'medusa' else ''}")
    print(f"acceptance {decision.acceptance}, temperature {decision.temperature:g}, deadline {_seconds(decision)}")
    print(f"rule {decision.rule}, policy {decision.policy_version}")
    for stage in decision.stages:
        print(f"  {stage.name}: {stage.reason}")
    return 0


def run_schema(args: argparse.Namespace) -> int:
    from policy.file.format import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def run_diff(args: argparse.Namespace) -> int:
    from policy.diff import differences

    lines = differences(_loaded(args.before), _loaded(args.after))
    print("\n".join(lines) if lines else "no difference for any request")
    return 1 if lines else 0


def _load(name: str) -> PolicySpec:
    """Raises PolicyError or OSError."""
    from policy.file.format import parse_policy

    return parse_policy(read_input(name), name)


def _loaded(name: str | None) -> PolicySpec:
    from policy.config.problems import PolicyError
    from policy.runtime import PolicyRuntime

    try:
        return PolicyRuntime.embedded().spec if name is None else _load(name)
    except PolicyError as error:
        raise CommandError(str(error)) from None


def _seconds(decision: Any) -> str:
    return "none" if decision.deadline_s is None else f"{decision.deadline_s:g} s"
