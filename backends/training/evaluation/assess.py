"""Heads side by side on one backbone: accuracy on answers, and what the engine makes of them on this device.

Two measurements, by class of prompts and temperature:

* *Accuracy and replay* over given answers (:mod:`backends.training.evaluation.accuracy`): no decoding, the same rows
for all. * *Decoding*: the engine itself, one request at a time, with the trees that its planner draws from the cost
table
  measured here. All heads decode the same prompts with the same seeds against the same cost of a row, so their tokens
  are equal and their steps can be compared. The speedup is by the cost table, which other work on the machine disturbs
  less than it would a race against the clock; such a race (:mod:`backends.training.evaluation.race`) is run where it is
  asked for.

For typical acceptance, which is lossy, the same prompts are decoded once more and compared with the exact answers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from backends.checkpoints.loader import BackboneFacts, LoadedHeads, load_own
from backends.cost.calibration import Calibration
from backends.cost.probe import CostProbe
from backends.cost.step_cost import StepCost
from backends.engine.core import EngineCore
from backends.engine.loading import torch_resting
from backends.heads.module import MedusaHeads
from backends.speculation.batch_gate import DraftGate
from backends.training.backbone import Backbone
from backends.training.data.dataset import Answer, AnswersError, HiddenStates
from backends.training.evaluation.accuracy import ALL_CLASSES, guess, rank_accuracy, replay
from backends.training.evaluation.race import MeasuredCell, decode_prompt, race
from backends.training.objective import OutputProjection
from backends.training.states import collect_states
from backends.tree import CandidateTree
from backends.types import Acceptance, DecodingPlan, GenerationStats, SamplingParams


@dataclass(frozen=True, slots=True)
class AssessOptions:
    """``per_class``: most prompts of a class that are decoded. ``node_counts``: sizes of replayed trees.

    ``rounds``: of the race against vanilla decoding on the clock; 0: none. ``cost``: instead of one measured here.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7)
    per_class: int = 8
    max_new_tokens: int = 128
    node_counts: tuple[int, ...] = (4, 7, 11, 15)
    typical: bool = False
    rounds: int = 0
    seed: int = 0
    cost: StepCost | None = None


@dataclass(frozen=True, slots=True)
class AccuracyCell:
    """Answers of one class ("all": every class) at one temperature.

    ``accuracy``: share of rows at which the guess of exactly that rank was right, [heads][ranks]. ``dynamic`` and
    ``static``: tokens per step of replayed trees by their number of nodes; a static tree is the best fixed one for
    these accuracies.
    """

    label: str
    temperature: float
    answers: int
    rows: int
    accuracy: list[list[float]]
    dynamic: dict[int, float]
    static: dict[int, float]


@dataclass(frozen=True, slots=True)
class DecodedCell:
    """What the engine did with the prompts of a class at one temperature.

    ``accepted_per_step``: of the heads' guesses; a step emits one token more. ``speedup``: over vanilla decoding, by
    the cost table.
    """

    label: str
    temperature: float
    answers: int
    tokens: int
    tokens_per_step: float
    accepted_per_step: float
    nodes_per_step: float
    speedup: float


@dataclass(frozen=True, slots=True)
class TypicalCell:
    """Typical acceptance against exact decoding of the same prompts, at one temperature.

    ``differing_tokens``: share of positions, of the longer answer, at which the two differ. Perplexities are of the
    answers under the backbone, at temperature 1.
    """

    temperature: float
    tokens_per_step: float
    exact_tokens_per_step: float
    speedup: float
    exact_speedup: float
    perplexity: float
    exact_perplexity: float
    differing_tokens: float
    differing_answers: float


@dataclass(frozen=True, slots=True)
class HeadsAssessment:
    """``own_backbone``: whether the heads were trained on exactly this backbone; None where their config doesn't say.

    ``heads_ms``: what one evaluation of the heads costs for one sequence.
    """

    folder: str
    num_heads: int
    parameters: int
    own_backbone: bool | None
    heads_ms: float
    accuracy: list[AccuracyCell]
    decoded: list[DecodedCell]
    typical: list[TypicalCell]
    measured: list[MeasuredCell] = field(default_factory=list)

    @property
    def overall(self) -> float:
        """The geometric mean of the speedups over classes and temperatures: on the clock if there was a race, else by
        the cost table."""
        cells = self.measured or self.decoded
        return statistics.geometric_mean(cell.speedup for cell in cells if cell.label != ALL_CLASSES)


@dataclass(frozen=True, slots=True)
class Assessment:
    """``cost_ms``: milliseconds of a forward by rows, on this device; the expected speedups are made of these."""

    model: str
    adapted_from: str
    device: str
    runner: str
    cost_ms: dict[int, float]
    heads: list[HeadsAssessment]

    @property
    def winner(self) -> HeadsAssessment:
        """The heads with the highest overall speedup."""
        return max(self.heads, key=lambda each: each.overall)

    def to_json(self) -> dict[str, Any]:
        best = self.winner
        winner = {"folder": best.folder, "speedup": best.overall, "by": "clock" if best.measured else "cost table"}
        return _rounded({**asdict(self), "winner": winner})


@dataclass(slots=True)
class _Decoded:
    prompts: list[Answer]
    answers: list[list[int]]
    stats: list[GenerationStats]


def assess(
    backbone: Backbone,
    folders: Sequence[Path],
    prompts: Sequence[Answer],
    answers: Sequence[Answer],
    work_dir: Path,
    options: AssessOptions,
    *,
    log: Callable[[str], object],
) -> Assessment:
    """Assess heads folders one after the other.

    ``prompts``: answers whose prompts are decoded, the first ``per_class`` of every class. ``answers``: for accuracy;
    without any, those that the engine gives to ``prompts``. Raises :class:`backends.heads.module.HeadsError` for heads
    that don't fit, :class:`AnswersError` when no prompt leaves room for an answer (those that don't are left out).
    """
    facts = BackboneFacts.of(backbone.model)
    loaded = [load_own(folder, facts) for folder in folders]
    room = backbone.model.config.max_position_embeddings - options.max_new_tokens
    chosen = _first_of_each_class([prompt for prompt in prompts if len(prompt.prompt_ids) <= room], options.per_class)
    if not chosen:
        raise AnswersError(f"no prompt leaves room for {options.max_new_tokens} new tokens; lower --max-new-tokens")
    longest = max(len(prompt.prompt_ids) for prompt in chosen) + options.max_new_tokens
    decoded: list[dict[tuple[float, Acceptance], _Decoded]] = []
    with backbone.engine(kv_tokens=longest + 64, cost=options.cost) as vanilla, torch_resting(vanilla.runner):
        runner = vanilla.runner
        cores = [_core_with(vanilla, each, options.cost) for each in loaded]
        for folder, core in zip(folders, cores, strict=True):
            priced = _at_its_word(core)
            runs: dict[tuple[float, Acceptance], _Decoded] = {}
            for temperature in options.temperatures:
                for acceptance in ("exact", "typical") if options.typical else ("exact",):
                    log(f"{folder}: decoding {len(chosen)} prompts, temperature {temperature:g}, {acceptance}")
                    runs[temperature, acceptance] = _decode(priced, chosen, temperature, acceptance, options)
            decoded.append(runs)
        measured: list[list[MeasuredCell]] = [[] for _ in cores]
        if options.rounds:
            measured = race(
                cores,
                chosen,
                options.temperatures,
                rounds=options.rounds,
                max_new_tokens=options.max_new_tokens,
                seed=options.seed,
                log=log,
            )
    answers = answers or _as_answers(decoded[0])
    states = collect_states(backbone, answers, work_dir / "hidden", log=log)
    results = []
    for folder, each, core, runs, raced in zip(folders, loaded, cores, decoded, measured, strict=True):
        heads = each.heads
        assert isinstance(heads, MedusaHeads)
        results.append(
            HeadsAssessment(
                folder=str(folder),
                num_heads=heads.num_heads,
                parameters=sum(parameter.numel() for parameter in heads.parameters()),
                own_backbone=None if each.stale is None else not each.stale,
                heads_ms=core.cost.heads_ms(1),
                accuracy=accuracy_cells(backbone, heads, states, options.node_counts),
                decoded=[cell for t in options.temperatures for cell in decoded_cells(runs[t, "exact"], temperature=t)],
                typical=[typical_cell(backbone, runs, t) for t in options.temperatures] if options.typical else [],
                measured=raced,
            )
        )
    rows = dict(vanilla.cost.rows)
    return Assessment(backbone.name, backbone.adapted_from, str(runner.device), runner.kind, rows, results)


def accuracy_cells(
    backbone: Backbone, heads: MedusaHeads, states: HiddenStates, node_counts: Sequence[int]
) -> list[AccuracyCell]:
    """Accuracy and replays over all answers of ``states``, by class and temperature of the answers."""
    projection = OutputProjection.of_model(backbone.model, heads.draft_token_ids)
    heads = heads.eval().to(projection.lm_head_rows.device)
    targets = states.targets(heads.num_heads)
    cells = []
    for temperature in sorted({answer.temperature for answer in states.answers}):
        indices = [i for i, answer in enumerate(states.answers) if answer.temperature == temperature]
        # The last row of an answer has nothing to be guessed.
        spans = [torch.arange(r.start, r.stop - 1) for r in map(states.rows_of, indices)]
        labels = [states.answers[i].label or "unlabelled" for i in indices]
        guesses = guess(heads, projection, states, torch.cat(spans))
        label_of_row = [label for label, span in zip(labels, spans, strict=True) for _ in span]
        for label in (ALL_CLASSES, *sorted(set(labels))):
            chosen = [row for row, other in enumerate(label_of_row) if label in (ALL_CLASSES, other)]
            part = guesses.select(torch.tensor(chosen))
            accuracy = rank_accuracy(part, targets[:, part.rows])
            best = CandidateTree.from_accuracies(accuracy, max(node_counts))
            dynamic = {n: replay(states, part, n)[ALL_CLASSES].tokens_per_step for n in node_counts}
            static = {n: replay(states, part, n, static_tree=best)[ALL_CLASSES].tokens_per_step for n in node_counts}
            count = sum(label in (ALL_CLASSES, other) for other in labels)
            cells.append(AccuracyCell(label, temperature, count, len(chosen), accuracy, dynamic, static))
    return cells


def decoded_cells(run: _Decoded, *, temperature: float) -> list[DecodedCell]:
    """One cell for all prompts and one for each class."""
    labels = [prompt.label or "unlabelled" for prompt in run.prompts]
    cells = []
    for label in (ALL_CLASSES, *sorted(set(labels))):
        stats = [s for s, other in zip(run.stats, labels, strict=True) if label in (ALL_CLASSES, other)]
        steps = sum(s.steps for s in stats)
        tokens = sum(s.emitted_tokens for s in stats)
        cells.append(
            DecodedCell(
                label,
                temperature,
                len(stats),
                tokens,
                tokens_per_step=tokens / steps,
                accepted_per_step=sum(s.accepted_draft_tokens for s in stats) / steps,
                nodes_per_step=sum(s.drafted_tokens for s in stats) / steps,
                speedup=sum(s.speedup_estimate * s.steps for s in stats) / steps,
            )
        )
    return cells


def typical_cell(backbone: Backbone, runs: dict[tuple[float, Acceptance], _Decoded], temperature: float) -> TypicalCell:
    """Compare the typical with the exact run at one temperature."""
    typical, exact = runs[temperature, "typical"], runs[temperature, "exact"]
    with_typical, with_exact = (decoded_cells(run, temperature=temperature)[0] for run in (typical, exact))
    pairs = list(zip(typical.answers, exact.answers, strict=True))
    differing = sum(differing_tokens(a, b) for a, b in pairs)
    return TypicalCell(
        temperature,
        tokens_per_step=with_typical.tokens_per_step,
        exact_tokens_per_step=with_exact.tokens_per_step,
        speedup=with_typical.speedup,
        exact_speedup=with_exact.speedup,
        perplexity=perplexity(backbone, typical.prompts, typical.answers),
        exact_perplexity=perplexity(backbone, exact.prompts, exact.answers),
        differing_tokens=differing / sum(max(len(a), len(b)) for a, b in pairs),
        differing_answers=sum(a != b for a, b in pairs) / len(pairs),
    )


def differing_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Positions at which two answers differ, one having ended counting as different."""
    return abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False))


@torch.inference_mode()
def perplexity(backbone: Backbone, prompts: Sequence[Answer], answers: Sequence[Sequence[int]]) -> float:
    """Of the answers' tokens under the backbone, each after its prompt, at temperature 1."""
    device = backbone.model.get_input_embeddings().weight.device
    total, count = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt.prompt_ids, *answer]], device=device)
        logits = backbone.model(input_ids=ids, use_cache=False).logits[0, len(prompt.prompt_ids) - 1 : -1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt.prompt_ids) :], reduction="sum"))
        count += len(answer)
    return math.exp(total / max(count, 1))


def _core_with(vanilla: EngineCore, heads: LoadedHeads, cost: StepCost | None) -> EngineCore:
    """An engine with these heads over the same runner, as it would serve. The cost of a row is the same for all of
    them: two measurements would differ by more than the heads do."""
    runner = vanilla.runner
    bound = heads.bind(runner)
    cost = cost or StepCost.from_measurements(vanilla.cost.rows, CostProbe(runner, bound).measure_heads())
    gate = DraftGate(cost, heads.accuracies)
    return EngineCore(runner, bound, vanilla.tokenizer, vanilla.config, cost, time.monotonic, None, gate)


def _at_its_word(core: EngineCore) -> EngineCore:
    """The same engine, which believes its cost table whatever the clock says."""
    return EngineCore(
        core.runner,
        core.heads,
        core.tokenizer,
        core.config,
        core.cost,
        time.monotonic,
        calibration=Calibration(enabled=False),
    )


def _decode(
    core: EngineCore, prompts: Sequence[Answer], temperature: float, acceptance: Acceptance, options: AssessOptions
) -> _Decoded:
    """One request at a time and without lookup: what the heads are worth, and nobody else."""
    levels = core.heads.num_heads if core.heads else 0
    plan = DecodingPlan(num_heads=levels, lookup=False, acceptance=acceptance, reason="evaluation")
    answers, stats = [], []
    for number, prompt in enumerate(prompts):
        seed = options.seed * 1_000_003 + number
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=options.max_new_tokens)
        answer, told = decode_prompt(core, prompt, plan, sampling)
        answers.append(answer)
        stats.append(told)
    return _Decoded(list(prompts), answers, stats)


def _as_answers(runs: dict[tuple[float, Acceptance], _Decoded]) -> list[Answer]:
    return [
        replace(prompt, answer_ids=tuple(answer), temperature=temperature)
        for (temperature, acceptance), run in runs.items()
        if acceptance == "exact"
        for prompt, answer in zip(run.prompts, run.answers, strict=True)
        if len(answer) >= 2
    ]


def _first_of_each_class(prompts: Sequence[Answer], count: int) -> list[Answer]:
    """At most ``count`` of every class, each prompt once."""
    taken: dict[str, dict[str, Answer]] = {}
    for prompt in prompts:
        of_class = taken.setdefault(prompt.label, {})
        if len(of_class) < count:
            of_class.setdefault(prompt.id, prompt)
    return [prompt for of_class in taken.values() for prompt in of_class.values()]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
