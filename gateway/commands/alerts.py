"""``medusa-gateway alerts rules``: a policy's alerts as Prometheus rules. Needs no gateway."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gateway.commands.errors import CommandError


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "alerts", help="print a policy's alerts as Prometheus rules", description="Work with the alerts of a policy."
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    rules = actions.add_parser("rules", help="print the alerts as a PrometheusRule, or as a rule file")
    add = rules.add_argument
    add("--policy", metavar="FILE", help="default: the policy that ships with the gateway")
    formats = "for Prometheus Operator, or for Prometheus itself; default: %(default)s"
    add("--format", choices=("prometheusrule", "rules"), default="prometheusrule", help=formats)
    add("--name", default="medusa-gateway", metavar="NAME", help="of the PrometheusRule; default: %(default)s")
    add("--namespace", metavar="NAME", help="of the PrometheusRule; default: none")
    label = "a label of the PrometheusRule, by which an operator finds it; may be repeated"
    add("--metadata-label", type=_pair, action="append", default=[], metavar="K=V", help=label)
    add("--label", type=_pair, action="append", default=[], metavar="K=V", help="a label of every alert; as above")
    rules.set_defaults(run=run_rules)


def run_rules(args: argparse.Namespace) -> int:
    import yaml

    from policy.config.problems import PolicyError
    from policy.file.format import parse_policy
    from policy.runtime import PolicyRuntime
    from telemetry.alerts.prometheus_rules import prometheus_rule, rule_file

    try:
        spec = (
            PolicyRuntime.embedded().spec
            if args.policy is None
            else parse_policy(Path(args.policy).read_bytes(), args.policy)
        )
    except PolicyError as error:
        raise CommandError(str(error)) from None
    if args.format == "rules":
        made = rule_file(spec.alerts, dict(args.label), spec.runbooks)
    else:
        made = prometheus_rule(
            spec.alerts,
            name=args.name,
            namespace=args.namespace,
            metadata_labels=dict(args.metadata_label),
            labels=dict(args.label),
            runbooks=spec.runbooks,
        )
    print(yaml.safe_dump(made, sort_keys=False, width=120, allow_unicode=True), end="")
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
