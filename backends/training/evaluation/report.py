"""An assessment as text, and as one HTML file with its plots inside."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from backends.training.checkpoint import TrainingError
from backends.training.evaluation.accuracy import ALL_CLASSES
from backends.training.evaluation.assess import AccuracyCell, Assessment, HeadsAssessment

_RANKS_SHOWN = (1, 2, 3, 5, 10)
# Distinguishable with the common kinds of colour blindness (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Medusa heads on {{ a.model }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .7rem; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } .warning { color: #b00 }
</style></head><body>
<h1>Medusa heads on {{ a.model }}</h1>
{% if a.adapted_from %}<p class="warning">{{ a.model }} was adapted from {{ a.adapted_from }}: its answers are its own.
</p>{% endif %}
<p>Device {{ a.device }}, runner {{ a.runner }}. Speedups are over vanilla decoding, one request at a time, by the cost
table measured here.</p>
<table><tr><th>heads</th><th>folder</th><th>number</th><th>parameters</th><th>ms a step</th></tr>
{% for name, h in names %}<tr><td>{{ name }}</td><td>{{ h.folder }}</td><td>{{ h.num_heads }}</td>
<td>{{ "{:,}".format(h.parameters) }}</td><td>{{ "%.2f"|format(h.heads_ms) }}</td></tr>{% endfor %}</table>
{% for name, h in names if h.own_backbone == false %}
<p class="warning">{{ name }} was trained for another backbone.</p>{% endfor %}
<h2>Decoded by the engine</h2>{{ plots.decoded|safe }}{{ tables.decoded|safe }}
{% if tables.measured %}<h2>Against vanilla decoding, on the clock</h2>{{ tables.measured|safe }}
<p>Medians over rounds, and the range of the rounds' speedups.</p>{% endif %}
{% for line in verdict %}<p>{{ line }}</p>{% endfor %}
<h2>Accuracy of each head</h2>{{ plots.accuracy|safe }}{{ tables.accuracy|safe }}
<h2>Tokens per step by size of tree</h2>
<p>Answers replayed. Dynamic: each step's tree fits the heads' probabilities. Static: the best fixed tree.</p>
{{ plots.trees|safe }}
{% if tables.typical %}<h2>What typical acceptance costs</h2>{{ tables.typical|safe }}
<p>Perplexity of the answers under the backbone; differing: against the exact answers to the same prompts.</p>
{% endif %}
<h2>Cost of a step</h2>{{ plots.cost|safe }}
</body></html>
"""


def assessment_text(assessment: Assessment) -> str:
    """Tables for a terminal; several heads stand side by side."""
    tables = [decoded_table(assessment), *_if_any(measured_table(assessment)), accuracy_table(assessment)]
    if assessment.heads[0].typical:
        tables.append(typical_table(assessment))
    notes = [
        f"{name}: {heads.folder}, {heads.num_heads} heads, {heads.parameters:,} parameters, {heads.heads_ms:.2f} ms"
        + (" (trained for another backbone)" if heads.own_backbone is False else "")
        for name, heads in named(assessment)
    ]
    return "\n".join([*notes, *(f"\n{_plain(table)}" for table in tables), *_verdict(assessment)])


def _if_any(table: list[list[str]]) -> list[list[list[str]]]:
    return [table] if len(table) > 1 else []


def _verdict(assessment: Assessment) -> list[str]:
    """Who wins, where there is a choice."""
    if len(assessment.heads) < 2:
        return []
    best = assessment.winner
    (name,) = (name for name, heads in named(assessment) if heads is best)
    by = "on the clock" if best.measured else "expected"
    return [f"\nbest: {name}, speedup {best.overall:.3f} {by} (geometric mean over classes and temperatures)"]


def named(assessment: Assessment) -> list[tuple[str, HeadsAssessment]]:
    """Short names for the heads: the folder's, or letters where those are not distinct."""
    names = [Path(heads.folder).name for heads in assessment.heads]
    if len(set(names)) < len(names):
        names = [chr(ord("A") + i) for i in range(len(names))]
    return list(zip(names, assessment.heads, strict=True))


def decoded_table(assessment: Assessment) -> list[list[str]]:
    header = ["class", "temperature", "prompts"]
    for name, _ in named(assessment):
        header += [f"{name}: tokens/step", "accepted", "nodes", "expected speedup"]
    rows = [header]
    for cells in zip(*(heads.decoded for heads in assessment.heads), strict=True):
        row = [cells[0].label, f"{cells[0].temperature:g}", str(cells[0].answers)]
        for cell in cells:
            row += [f"{cell.tokens_per_step:.3f}", f"{cell.accepted_per_step:.3f}"]
            row += [f"{cell.nodes_per_step:.2f}", f"{cell.speedup:.3f}"]
        rows.append(row)
    return rows


def measured_table(assessment: Assessment) -> list[list[str]]:
    """Tokens per second and speedup on the clock, with the slowest and the fastest round."""
    header = ["class", "temperature", "vanilla: tokens/s"]
    for name, _ in named(assessment):
        header += [f"{name}: tokens/s", "speedup", "rounds"]
    rows = [header]
    for cells in zip(*(heads.measured for heads in assessment.heads), strict=True):
        row = [cells[0].label, f"{cells[0].temperature:g}", f"{cells[0].vanilla_tokens_per_s:.1f}"]
        for cell in cells:
            row += [f"{cell.tokens_per_s:.1f}", f"{cell.speedup:.3f}", f"{cell.slowest:.2f}-{cell.fastest:.2f}"]
        rows.append(row)
    return rows


def accuracy_table(assessment: Assessment) -> list[list[str]]:
    """Cumulative over ranks, in percent."""
    rows = [["class", "temperature", "heads", "head", *(f"top-{k}" for k in _RANKS_SHOWN)]]
    for name, heads in named(assessment):
        for cell in heads.accuracy:
            for number, ranks in enumerate(cell.accuracy, start=1):
                shares = [f"{100 * sum(ranks[:k]):.1f}" for k in _RANKS_SHOWN]
                rows.append([cell.label, f"{cell.temperature:g}", name, str(number), *shares])
    return rows


def typical_table(assessment: Assessment) -> list[list[str]]:
    rows = [
        [
            "heads", "temperature", "tokens/step exact", "typical", "speedup exact", "typical",
            "perplexity exact", "typical", "differing tokens", "differing answers",
        ]
    ]  # fmt: skip
    rows += [
        [
            name,
            f"{cell.temperature:g}",
            f"{cell.exact_tokens_per_step:.3f}",
            f"{cell.tokens_per_step:.3f}",
            f"{cell.exact_speedup:.3f}",
            f"{cell.speedup:.3f}",
            f"{cell.exact_perplexity:.3f}",
            f"{cell.perplexity:.3f}",
            f"{100 * cell.differing_tokens:.1f}%",
            f"{100 * cell.differing_answers:.1f}%",
        ]
        for name, heads in named(assessment)
        for cell in heads.typical
    ]
    return rows


def assessment_html(assessment: Assessment) -> str:
    """One file without anything outside it. Raises :class:`TrainingError` without matplotlib."""
    tables: dict[str, Any] = {
        "decoded": _html(decoded_table(assessment)),
        "accuracy": _html(accuracy_table(assessment)),
        "typical": _html(typical_table(assessment)) if assessment.heads[0].typical else "",
        "measured": "".join(map(_html, _if_any(measured_table(assessment)))),
    }
    plots = {
        "decoded": _decoded_plot(assessment),
        "accuracy": _accuracy_plot(assessment),
        "trees": _trees_plot(assessment),
        "cost": _cost_plot(assessment),
    }
    page = Environment(autoescape=True).from_string(_PAGE)
    verdict = _verdict(assessment)
    return page.render(a=assessment, names=named(assessment), tables=tables, plots=plots, verdict=verdict)


def _plain(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _html(rows: Sequence[Sequence[str]]) -> str:
    table = (
        "<table><tr>{% for cell in rows[0] %}<th>{{ cell }}</th>{% endfor %}</tr>\n"
        "{% for row in rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>\n{% endfor %}</table>"
    )
    return Environment(autoescape=True).from_string(table).render(rows=rows)


def _decoded_plot(assessment: Assessment) -> str:
    figure, axes = _axes(2, "speedup", "tokens per step")
    entries = named(assessment)
    labels = [f"{cell.label}\nt={cell.temperature:g}" for cell in assessment.heads[0].decoded]
    width = 0.8 / len(entries)
    for number, (name, heads) in enumerate(entries):
        places = [place + (number - (len(entries) - 1) / 2) * width for place in range(len(labels))]
        for axis, values in (
            (axes[0], [cell.speedup for cell in heads.decoded]),
            (axes[1], [cell.tokens_per_step for cell in heads.decoded]),
        ):
            axis.bar(places, values, width, color=_COLOURS[number % len(_COLOURS)], label=name)
    for axis in axes:
        axis.axhline(1.0, color="#888", linewidth=0.8)
        axis.set_xticks(range(len(labels)), labels, fontsize=7)
    _legend(figure, axes)
    return _svg(figure)


def _accuracy_plot(assessment: Assessment) -> str:
    temperatures = sorted({cell.temperature for cell in assessment.heads[0].accuracy})
    figure, axes = _axes(len(temperatures), *(f"top-k accuracy, temperature {t:g}" for t in temperatures))
    for axis, temperature in zip(axes, temperatures, strict=True):
        for number, (name, heads) in enumerate(named(assessment)):
            for head, ranks in enumerate(_overall(heads, temperature).accuracy):
                axis.plot(
                    range(1, len(ranks) + 1),
                    [sum(ranks[: k + 1]) for k in range(len(ranks))],
                    color=_COLOURS[number % len(_COLOURS)],
                    alpha=1 - 0.2 * min(head, 3),
                    marker=".",
                    label=f"{name}, head {head + 1}",
                )
        axis.set_xlabel("k")
        axis.set_ylim(0, 1)
    _legend(figure, axes)
    return _svg(figure)


def _trees_plot(assessment: Assessment) -> str:
    temperatures = sorted({cell.temperature for cell in assessment.heads[0].accuracy})
    figure, axes = _axes(len(temperatures), *(f"tokens per step, temperature {t:g}" for t in temperatures))
    for axis, temperature in zip(axes, temperatures, strict=True):
        for number, (name, heads) in enumerate(named(assessment)):
            cell = _overall(heads, temperature)
            for kind, line, rates in (("dynamic", "-", cell.dynamic), ("static", "--", cell.static)):
                axis.plot(
                    list(rates),
                    list(rates.values()),
                    line,
                    marker=".",
                    color=_COLOURS[number % len(_COLOURS)],
                    label=f"{name}, {kind}",
                )
        axis.set_xlabel("nodes")
    _legend(figure, axes)
    return _svg(figure)


def _cost_plot(assessment: Assessment) -> str:
    figure, axes = _axes(1, "ms of a forward")
    axes[0].plot(list(assessment.cost_ms), list(assessment.cost_ms.values()), marker=".", color=_COLOURS[0])
    axes[0].set_xlabel("rows")
    axes[0].set_ylim(bottom=0)
    return _svg(figure)


def _overall(heads: HeadsAssessment, temperature: float) -> AccuracyCell:
    return next(c for c in heads.accuracy if (c.label, c.temperature) == (ALL_CLASSES, temperature))


def _axes(count: int, *titles: str) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise TrainingError("plots need matplotlib; install it with: pip install 'medusa-gateway[train]'") from None
    figure = Figure(figsize=(max(5.0, 4.6 * count), 3.4), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One for all axes, below them."""
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text as text
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
