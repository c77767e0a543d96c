"""This replica's alerts: the state of each rule for each model and class. No input or output here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policy.alerts import AlertRule
from telemetry.alerts.fleet import Alarm
from telemetry.alerts.readings import Subject
from telemetry.alerts.state_machine import AlertState, Change, adopted, advance


@dataclass(frozen=True, slots=True)
class Tracked:
    rule: AlertRule
    subject: Subject
    state: AlertState

    @property
    def key(self) -> str:
        return self.alarm().key

    def alarm(self, receivers: Sequence[str] = ()) -> Alarm:
        model, class_name = self.subject
        return Alarm(
            rule=self.rule.name,
            model=model,
            class_name=class_name,
            severity=self.rule.severity,
            summary=describe(self.rule, self.subject),
            value=self.state.value,
            receivers=tuple(receivers),
            labels=dict(self.rule.labels),
            annotations=dict(self.rule.annotations),
        )


@dataclass(frozen=True, slots=True)
class Happening:
    """A change of one alert's state, for the log and the events. ``withdrawn``: it ended because the policy has no such
    rule any more; nothing was found to be well."""

    change: Change
    rule: AlertRule
    subject: Subject
    value: float | None
    withdrawn: bool = False


def describe(rule: AlertRule, subject: Subject) -> str:
    """What is wrong, in one line: the operator's own words, or the condition."""
    if rule.summary:
        return rule.summary
    side = "below" if rule.below is not None else "above"
    about = "/".join(part for part in subject if part)
    head = f" (head {rule.head})" if rule.figure.by_head else ""
    return f"{rule.metric}{head} is {side} {rule.limit:g}{f' for {about}' if about else ''}"


@dataclass(slots=True)
class AlertBook:
    """Used from one thread only."""

    tracked: dict[str, Tracked] = field(default_factory=dict)

    def evaluate(
        self, rules: Sequence[AlertRule], read: Callable[[AlertRule], Mapping[Subject, float]], now: float
    ) -> list[Happening]:
        """Advance every alert. One whose rule is gone from the policy is resolved at once."""
        happenings: list[Happening] = []
        by_name = {rule.name: rule for rule in rules}
        for key, each in list(self.tracked.items()):
            rule_now = by_name.get(each.rule.name)
            if rule_now is None or rule_now.metric != each.rule.metric:
                del self.tracked[key]
                if each.state.phase != "inactive":
                    change: Change = "resolved" if each.state.phase == "firing" else "cancelled"
                    happenings.append(Happening(change, each.rule, each.subject, each.state.value, withdrawn=True))
        for rule in rules:
            values = dict(read(rule))
            known = {each.subject for each in self.tracked.values() if each.rule.name == rule.name}
            for subject in [*values, *(known - values.keys())]:
                before = Tracked(rule, subject, AlertState(since=now))
                before = replace(self.tracked.get(before.key, before), rule=rule)
                state, change_or_none = advance(before.state, rule, values.get(subject), now)
                self.tracked[before.key] = replace(before, state=state)
                if change_or_none is not None:
                    happenings.append(Happening(change_or_none, rule, subject, state.value))
        return happenings

    def adopt(self, alarm: Alarm, rules: Sequence[AlertRule], now: float) -> bool:
        """Go on with an alarm that a replica left firing when it died; False if no rule is about it any more."""
        rule = next((rule for rule in rules if rule.name == alarm.rule), None)
        if rule is None:
            return False
        each = self.tracked.get(alarm.key)
        if each is None or each.state.phase != "firing":
            self.tracked[alarm.key] = Tracked(rule, (alarm.model, alarm.class_name), adopted(now))
        return True

    def firing(self) -> list[Tracked]:
        return [each for each in self.tracked.values() if each.state.phase == "firing"]
