"""The model card beside trained heads: what they are for, their data and accuracy, how to make them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backends.heads.format import WEIGHTS_FILE, describe_heads, read_heads_config
from backends.models.demo import DEMO_MODEL_NAME
from backends.training.data.dataset import Answer

CARD_FILE = "README.md"


def count_licences(prompts: Iterable[Mapping[str, Any]], answers: Iterable[Answer]) -> dict[str, dict[str, int]]:
    """Answers by licence and source of their prompt: ``{licence: {source: answers}}``.

    Prompts that name no licence or source, and answers to unknown prompts, count under "not stated".
    """
    origin = {str(p["id"]): (p.get("licence") or "not stated", p.get("source") or "not stated") for p in prompts}
    counts = Counter(origin.get(answer.id, ("not stated", "not stated")) for answer in answers)
    by_licence: dict[str, dict[str, int]] = {}
    for (licence, source), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        by_licence.setdefault(licence, {})[source] = count
    return by_licence


def write_model_card(folder: Path) -> None:
    """Write ``README.md`` from the folder's ``config.json`` and tensors. Raises
    :class:`backends.heads.module.HeadsError`."""
    (folder / CARD_FILE).write_text(model_card(folder))


def model_card(folder: Path) -> str:
    config = read_heads_config(folder)
    facts = describe_heads(folder)
    backbone, training, held_out = config["backbone"], config["training"], config["held_out"]
    adapted = backbone.get("adapted_from")
    classes = ", ".join(f"{label} {count}" for label, count in sorted(training["answers_by_class"].items()))
    # Of other models' licences nothing is known here.
    demo = backbone["name"] == DEMO_MODEL_NAME
    licence = "Apache-2.0, as the backbone." if demo else "follows the backbone's and the prompts' (below)."
    by_temperature = training.get("answers_by_temperature", {})
    temperatures = "".join(f"; {count} at temperature {t}" for t, count in sorted(by_temperature.items()))
    formula = "h = x + W_down silu(W_up [x; e] + b)"
    if facts["layers"] > 1:
        formula += f", {facts['layers']} times, each on the result of the one before"
    own = facts["lm_head"] == "own"
    output = "an output layer of its own over" if own else "the backbone's own `lm_head` cut to"
    lines = [
        f"# Medusa heads for {backbone['name']}",
        "",
        f"{facts['num_heads']} heads that guess the tokens after the next one, so that medusa-gateway verifies several"
        " tokens in one step",
        "of the backbone. They change how fast an answer comes, never the answer: every guess is checked against the"
        " backbone itself.",
        "They are of no use without it, nor with another model or a fine-tuned version (compare the fingerprint).",
        "",
        f"- Backbone: {backbone['name']}, fingerprint `{backbone['fingerprint']}`, hidden size"
        f" {backbone['hidden_size']}, vocabulary {backbone['vocab_size']}.",
        f"- Head: `{formula}`, inner size {facts['inner_size']}, input `{facts['input']}`"
        f" (x: final-norm hidden state, e: embedding of the pending token), then {output}"
        f" {facts['draft_vocab_size']:,} tokens.",
        f"- File: `{WEIGHTS_FILE}`, bfloat16, {facts['bytes'] / 1e6:.2f} MB, format `{facts['format']}`.",
        f"- Licence: {licence}",
        "",
        "## Data",
        "",
        f"{'The original' if adapted else 'The'} backbone's own answers (self-distillation):"
        f" {training['answers']:,} answers,"
        f" {training['tokens']:,} tokens ({classes}{temperatures}).",
        "Another 5% of the prompts, chosen by a hash of their id, were kept out for the evaluation below."
        " Licences of the prompts, with the number of answers trained on:",
        "",
        "| licence | answers | sources |",
        "|---|---|---|",
    ]
    for licence, sources in training.get("licences", {}).items():
        named = ", ".join(f"{source} ({count})" for source, count in sources.items())
        lines.append(f"| {licence} | {sum(sources.values()):,} | {named} |")
    if adapted:
        lines[2:2] = [
            f"**The backbone was changed.** {backbone['name']} was made from {adapted['name']} (fingerprint"
            f" `{adapted['fingerprint']}`) by training it together with the heads; its answers are its own:"
            f" {backbone['drift']['divergence']:.4f} nats of KL divergence a token, and the same likeliest token at"
            f" {100 * backbone['drift']['agreement']:.1f}% of positions.",
            "",
        ]
    lines += [
        "",
        "## To make them again",
        "",
        "```sh",
        training["command"],
        "```",
        "",
        "AdamW, linear warm-up and cosine; " + ", ".join(f"{k} {v}" for k, v in training["options"].items()) + ".",
        "",
        f"## Accuracy on {held_out['answers']} held-out answers ({held_out['rows']:,} positions)",
        "",
        "Cumulative over ranks, in percent. A token outside the draft vocabulary counts as missed.",
        "",
        "| class | head | " + " | ".join(f"top-{rank}" for rank in range(1, 11)) + " |",
        "|---|---|" + "---|" * 10,
    ]
    for label, heads in {"all": config["accuracy"], **config["accuracy_by_class"]}.items():
        for head, ranks in enumerate(heads, start=1):
            shares = " | ".join(f"{100 * sum(ranks[:rank]):.1f}" for rank in range(1, 11))
            lines.append(f"| {label} | {head} | {shares} |")
    lines += [
        "",
        "## Tokens per step",
        "",
        "Held-out answers replayed as the engine decodes them (greedy): accepted guesses plus the one token that the",
        "backbone gives anyway; 1.00 is vanilla decoding. Dynamic: each step grows its own tree, best first by the",
        "heads' probabilities. Static: the best fixed tree for the accuracies above.",
        "",
    ]
    labels = sorted(next(iter(config["tokens_per_step"]["dynamic"].values())))
    lines += ["| tree | nodes | " + " | ".join(labels) + " |", "|---|---|" + "---|" * len(labels)]
    for kind, by_nodes in config["tokens_per_step"].items():
        for nodes, rates in by_nodes.items():
            lines.append(f"| {kind} | {nodes} | " + " | ".join(f"{rates[label]:.2f}" for label in labels) + " |")
    return "\n".join(lines) + "\n"
