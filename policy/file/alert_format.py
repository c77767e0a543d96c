"""The part of the policy file about alerts: its fields, and what in them must fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy.alerts import ACTIONS, FIGURES, AlertRule, Receiver
from policy.config.fields import Block, Duration, ManyOf, Name, Number, OneOf, Share, Texts
from policy.config.parts import LABEL, PATTERN, Part, complain_at, refuse_repeated_name, refuse_unknown_classes
from policy.config.problems import did_you_mean
from policy.config.yaml_source import Source

_VARIABLE = Name(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "the name of an environment variable")
_URL = Name(
    r"https?://[^\s/?#@]+(/\S*)?", "an http or https URL; one with a secret in it belongs in 'url_env'", secret=True
)

_OWN_LABELS = "alertname|severity|model|class|namespace|job|instance|backend"
LABELS = Texts(
    Name(
        rf"(?!__|(?:{_OWN_LABELS})$)[A-Za-z_][A-Za-z0-9_]{{0,62}}",
        "a label of one's own: letters, digits and '_', and none of those that alerts have anyway "
        f"({_OWN_LABELS.replace('|', ', ')})",
    ),
    Name(r"[^\n]{1,200}", "one line of text"),
    "labels by name",
)
_ANNOTATIONS = Texts(
    Name(
        r"(?!(?:summary|value|runbook_url|acknowledged)$)[A-Za-z_][A-Za-z0-9_]{0,62}",
        "an annotation of one's own: letters, digits and '_', and none of summary, value, runbook_url, acknowledged",
    ),
    Name(r"[^\n]{1,1000}", "one line of text"),
    "annotations by name",
)
_URL_OR_PATH = r"[^\s]{1,500}"
RUNBOOKS = Name(
    r"(?=.*\{alert\})[^\s]{1,500}", "where runbooks are, with {alert} for the alert's name: https://wiki/oncall/{alert}"
)
ALERT = Block(
    {
        "name": LABEL,
        "metric": OneOf(tuple(FIGURES)),
        "below": Number(0, 1e9),
        "above": Number(0, 1e9),
        "for": Duration(0, 86_400),
        "keep": Duration(0, 86_400),
        "severity": OneOf(("info", "warning", "critical")),
        "class": ManyOf(LABEL),
        "model": ManyOf(PATTERN),
        "head": Number(1, 64, whole=True),
        "actions": ManyOf(OneOf(ACTIONS)),
        "notify": ManyOf(LABEL),
        "summary": Name(r"[^\n]{1,300}", "one line of text"),
        "objective": Share(0.999999),
        "within": Duration(0.0001, 3600),
        "window": Duration(60, 21_600),
        "labels": LABELS,
        "annotations": _ANNOTATIONS,
        "runbook_url": Name(_URL_OR_PATH, "a URL or a path, without spaces"),
    },
    "an alert",
    required=("name", "metric"),
    about="Pending while the figure is past its limit, firing after 'for' of that, resolved after 'keep' without.",
)
RECEIVER = Block(
    {
        "kind": OneOf(("alertmanager", "webhook")),
        "url": _URL,
        "url_env": _VARIABLE,
        "token_env": _VARIABLE,
        "repeat": Duration(1, 604_800),
        "timeout": Duration(0.1, 60),
    },
    "the fields of a receiver",
    required=("kind",),
    about="Where alerts are posted. url_env and token_env name environment variables, which keeps secrets out of here.",
)
ALERTMANAGER_REPEAT_S = 60.0


def assemble_receivers(source: Source, parts: Mapping[str, Part]) -> dict[str, Receiver]:
    receivers: dict[str, Receiver] = {}
    for name, part in parts.items():
        given = part.given
        if not part.refused(source) and ("url" in given) == ("url_env" in given):
            source.complain(part.node, part.path, "give either url, or url_env: the environment variable that holds it")
        kind = given.get("kind", "webhook")
        own = Receiver(name, kind, repeat_s=ALERTMANAGER_REPEAT_S) if kind == "alertmanager" else Receiver(name)
        receivers[name] = Receiver(
            name,
            kind,
            url=given.get("url"),
            url_env=given.get("url_env"),
            token_env=given.get("token_env"),
            repeat_s=given.get("repeat", own.repeat_s),
            timeout_s=given.get("timeout", own.timeout_s),
        )
    return receivers


def assemble_alerts(
    source: Source,
    parts: tuple[Part, ...],
    classes: set[str],
    receivers: Mapping[str, Receiver],
    labels: tuple[tuple[str, str], ...],
    runbooks: str | None,
) -> tuple[AlertRule, ...]:
    """``labels``: of every alert, beside its own. ``runbooks``: where runbooks are, with {alert} in it."""
    alerts: list[AlertRule] = []
    names: set[str] = set()
    for part in parts:
        refuse_unknown_classes(source, part, part.given.get("class", ()), classes, "class")
        refuse_repeated_name(source, part, names, "alert")
        limits = {"below", "above"} & part.named
        if len(limits) == 2 or (not limits and not part.refused(source)):
            source.complain(part.node, part.path, "give either below or above: the limit that the metric crosses")
        alert = _alert(part.given, labels, runbooks)
        if alert.metric:
            _refuse_contradictions(source, part, alert)
        for name in alert.notify:
            if name not in receivers:
                hint = did_you_mean(name, receivers) if receivers else "add it under 'receivers'"
                complain_at(source, part, "notify", f"there is no receiver '{name}'; {hint}")
        alerts.append(alert)
        names.add(alert.name)
    return tuple(alerts)


def _refuse_contradictions(source: Source, part: Part, alert: AlertRule) -> None:
    given, figure = part.given, alert.figure
    if "class" in given and figure.scope != "class":
        complain_at(source, part, "class", f"{alert.metric} is not measured by class; remove 'class'")
    if "model" in given and figure.scope == "fleet":
        complain_at(source, part, "model", f"{alert.metric} is not measured by model; remove 'model'")
    if "head" in given and not figure.by_head:
        complain_at(source, part, "head", f"{alert.metric} is not measured by head; remove 'head'")
    for name in ("objective", "window"):
        if name in given and not figure.burn:
            complain_at(source, part, name, f"{alert.metric} has no objective; remove '{name}'")
    if figure.bounds and "within" not in part.named:
        complain_at(source, part, "within", f"is missing: from when on is {alert.metric} to count a request as slow?")
    if "within" in given and not figure.bounds:
        complain_at(source, part, "within", f"{alert.metric} is not about times; remove 'within'")
    elif alert.within_s is not None and alert.within_s not in figure.bounds:
        nearest = min(figure.bounds, key=lambda bound: abs(bound - given["within"]))
        bounds = ", ".join(f"{bound:g}" for bound in figure.bounds)
        message = f"must be one of the times that are counted apart, such as {nearest:g}s; in seconds they are {bounds}"
        complain_at(source, part, "within", message)
    if figure.burn and "below" in given:
        complain_at(source, part, "below", f"a burn rate is good news when it is low; give 'above' for {alert.metric}")
    if "fall_back" in alert.actions and figure.scope == "fleet":
        complain_at(source, part, "actions", f"fall_back needs a class or a model, which {alert.metric} has not")
    if "notify" in given and "webhook" not in alert.actions:
        complain_at(source, part, "notify", "has no effect without the action webhook; add it or remove 'notify'")


def _alert(given: Mapping[str, Any], labels: tuple[tuple[str, str], ...], runbooks: str | None) -> AlertRule:
    own = AlertRule("", "")
    name = given.get("name", "")
    runbook = given.get("runbook_url", None if runbooks is None else runbooks.replace("{alert}", name))
    annotations = dict(given.get("annotations", ())) | ({} if runbook is None else {"runbook_url": runbook})
    return AlertRule(
        name=name,
        metric=given.get("metric", ""),
        below=given.get("below"),
        above=given.get("above"),
        for_s=given.get("for", own.for_s),
        keep_s=given.get("keep", own.keep_s),
        severity=given.get("severity", own.severity),
        classes=given.get("class", ()),
        models=given.get("model", ()),
        head=given.get("head", own.head),
        actions=given.get("actions", own.actions),
        notify=given.get("notify", ()),
        summary=given.get("summary", ""),
        objective=given.get("objective", own.objective),
        within_s=given.get("within"),
        window_s=given.get("window", own.window_s),
        labels=tuple(sorted({**dict(labels), **dict(given.get("labels", ()))}.items())),
        annotations=tuple(sorted(annotations.items())),
    )
