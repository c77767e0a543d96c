"""Training data, generated prompts, and classifiers with labels of an operator's own."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gateway.classifier import PromptClassifier
from gateway.classifier.features import _code_marks
from gateway.classifier.lexicon import Lexicon, read_lexicon, tokens
from gateway.classifier.model import ModelArrays
from gateway.classifier.text import read_request
from gateway.classifier.training.dataset import DataError, Example, read_examples, read_prompts, shipped_sets
from gateway.classifier.training.earlier import Earlier
from gateway.classifier.training.evaluation import evaluate
from gateway.classifier.training.fit import (
    FeatureMatrix,
    calibrate,
    fit_weights,
    folds_by_source,
    plain_text,
    softmax,
    train,
    with_generated,
)
from gateway.classifier.training.generator import LABELS, PromptGenerator
from gateway.classifier.training.pastes import place


def example(prompt: str, label: str, source: str = "data") -> Example:
    return Example(prompt, source, "CC0", label, "en", (("user", prompt),))


def support_examples() -> list[Example]:
    """Three labels that have nothing to do with code, chat or creative."""
    subjects = ["my last order", "the invoice", "account 42", "the blue one", "March", "my brother", "the app", "today"]
    asks = {
        "billing": [
            "refund {}",
            "why was I charged twice for {}",
            "send me the receipt of {}",
            "payment for {} failed",
        ],
        "shipping": ["where is the parcel with {}", "delivery of {} is late", "change the address for {}", "track {}"],
        "login": ["I forgot my password for {}", "can't sign in with {}", "reset access to {}", "locked out of {}"],
    }
    return [
        example(template.format(subject), label, f"shop-{i % 3}")
        for label, templates in asks.items()
        for template in templates
        for i, subject in enumerate(subjects)
    ]


def trained(examples: list[Example]) -> tuple[PromptClassifier, ModelArrays]:
    arrays = train(examples)
    return PromptClassifier(arrays), arrays


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "list instead of an object"),
        ('{"label": "code"}', 'neither of "prompt" and "messages"'),
        ('{"prompt": "a", "messages": [], "label": "code"}', "both of"),
        ('{"prompt": 1, "label": "code"}', '"prompt" is int'),
        ('{"prompt": "a"}', '"label" is missing'),
        ('{"prompt": "a", "label": ""}', '"label" is missing'),
        ('{"prompt": "a", "label": "code", "source": 3}', '"source" is int'),
        ('{"messages": [], "label": "code"}', "at least one message"),
        ('{"messages": [{"role": "boss", "content": "a"}], "label": "code"}', r'messages\[0\] needs a "role"'),
        ('{"messages": [{"role": "user", "content": 3}], "label": "code"}', r'messages\[0\]\."content"'),
        ('{"messages": [{"role": "user", "content": null}], "label": "code"}', "string"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_fix(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "fine", "label": "code"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=rf"data\.jsonl:3: .*{message}"):
        read_examples(path)


def test_missing_and_empty_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        read_examples(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no examples"):
        read_examples(tmp_path / "empty.jsonl")


def test_line_separators_inside_a_string_do_not_split_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        json.dumps({"prompt": "a\u2028b\u0085c", "label": "x"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_examples(path)[0].text() == "a\u2028b\u0085c"


def test_prompts_and_messages_are_read() -> None:
    lines = ['{"prompt": "a"}', "", '{"messages": [{"role": "user", "content": "b"}], "id": 7}']
    assert list(read_prompts("x", lines)) == ["a", [{"role": "user", "content": "b"}]]


def test_generator_is_deterministic_balanced_and_wide() -> None:
    first, second = PromptGenerator().generate(1_500, seed=4), PromptGenerator().generate(1_500, seed=4)
    assert first == second
    assert first != PromptGenerator().generate(1_500, seed=5)
    counts = Counter(e.label for e in first)
    assert counts.keys() == set(LABELS)
    assert max(counts.values()) - min(counts.values()) <= len(PromptGenerator().languages)
    assert len({e.lang for e in first}) >= 15


def test_generated_prompts_have_no_template_marks_left() -> None:
    slots = {name for templates in PromptGenerator()._templates.values() for name in templates.slots}
    for e in PromptGenerator().generate(6_000, seed=1):
        prompt = e.messages[-1][1]
        assert prompt.strip()
        assert not re.search(r"<<\w+>>", prompt)
        assert not any("{" + slot + "}" in prompt for slot in slots)


def test_leaving_a_language_out_changes_no_other() -> None:
    generator = PromptGenerator()
    everything = [e for e in generator.generate(900) if e.lang != "ja"]
    assert generator.generate(900, leave_out="ja") == everything


def test_evaluation_sets_are_never_trained_on() -> None:
    examples = with_generated([example("sort a list in go", "code")], None)
    assert not {plain_text(e) for e in examples} & {plain_text(e) for rows in shipped_sets().values() for e in rows}


def test_generated_prompts_join_the_built_in_labels_only() -> None:
    builtin = [example("sort a list in go", "code"), example("why?", "chat")]
    own = support_examples()
    assert len(with_generated(builtin, None)) > 10_000
    assert with_generated(own, None) == own
    assert with_generated(builtin, 0) == builtin
    with pytest.raises(DataError, match="--generated 0"):
        with_generated(own, 100)


def test_labels_are_data() -> None:
    classifier, arrays = trained(support_examples())
    assert arrays.labels == ("billing", "login", "shipping")
    assert classifier.classify("refund my money").label == "billing"
    assert classifier.classify("I forgot my password").label == "login"
    assert classifier.classify("where is the parcel").label == "shipping"


def test_two_labels_and_one_source_work() -> None:
    examples = [e for e in support_examples() if e.label != "login"]
    classifier, arrays = trained([example(e.text(), e.label) for e in examples])
    assert arrays.labels == ("billing", "shipping")
    assert classifier.classify("refund the invoice").label == "billing"
    assert classifier.classify("track my parcel").label == "shipping"


def test_one_label_is_refused() -> None:
    with pytest.raises(DataError, match="one label only"):
        train([example("a b c", "only"), example("d e f", "only")])


def test_training_is_deterministic() -> None:
    first, second = train(support_examples()), train(support_examples())
    assert np.array_equal(first.weights, second.weights) and first.keys == second.keys
    assert (first.temperatures, first.uncertain_below) == (second.temperatures, second.uncertain_below)


def test_folds_keep_sources_whole() -> None:
    examples = support_examples()
    folds = folds_by_source(examples)
    assert all(
        len({f for f, e in zip(folds, examples, strict=True) if e.source == s}) == 1 for s in ("shop-0", "shop-1")
    )
    assert len(set(folds)) == 3


def test_calibration_softens_a_model_that_is_too_sure() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 2_000)
    # The right label leads by 10 in 80% of the rows only: a softmax of it claims 0.9999.
    leads = np.where(rng.random(2_000) < 0.8, y, (y + 1) % 3)
    logits = 10.0 * np.eye(3)[leads]
    calibration = calibrate(logits, y)
    temperature = calibration.temperatures["en"]
    assert temperature > 2
    assert softmax(logits / temperature).max(axis=1).mean() == pytest.approx(0.8, abs=0.1)
    assert 0.3 < calibration.uncertain_below < 1
    assert calibration.error < 0.1


def test_calibration_knows_languages_apart() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 4_000)
    groups = np.where(np.arange(4_000) % 2, "en", "dense")
    # As sure in both, but right in 95% of the rows of one and in 60% of the other.
    right = rng.random(4_000) < np.where(groups == "en", 0.95, 0.6)
    logits = 6.0 * np.eye(3)[np.where(right, y, (y + 1) % 3)]
    calibration = calibrate(logits, y, groups)
    temperatures = calibration.temperatures
    assert temperatures["dense"] > 1.5 * temperatures["en"]
    assert temperatures["other"] == temperatures["dense"]  # no rows of its own: what is known outside English
    assert calibration.error < 0.05
    # At most a fifth may be called uncertain, whatever that leaves.
    assert calibration.uncertain <= 0.2


def test_an_earlier_version_is_scored_on_the_same_rows() -> None:
    # This checkout stands for the earlier one: its scores are those of the classifier beside it.
    examples = [
        example(f"{ask} {thing}", label, f"source-{i % 2}")
        for label, asks in {"code": ["function that sorts", "regex for"], "chat": ["why is", "tell me about"]}.items()
        for ask in asks
        for i, thing in enumerate(["rain", "dates", "apples", "salt"])
    ]
    matrix = FeatureMatrix.of(with_generated(examples, 600), Lexicon(read_lexicon()))
    earlier = Earlier(Path(__file__).parents[3], matrix.examples, matrix.labels, generated=600)
    try:
        held = np.array([0, 1, 8, 9])
        train_rows = np.setdiff1d(np.arange(len(matrix.examples)), held)
        expected = fit_weights(matrix, train_rows).logits(matrix.rows(held)).argmax(axis=1)
        assert np.array_equal(earlier.predict(train_rows, held), expected)
    finally:
        earlier.close()


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a checkout"):
        Earlier(tmp_path, [], ())


@pytest.mark.parametrize("language", sorted(PromptGenerator()._kinds))
def test_every_language_of_kinds_has_all_labels_and_pastes(language: str) -> None:
    rows = [e for e in PromptGenerator().generate(4_000, seed=2) if e.lang == language]
    assert {e.label for e in rows} == set(LABELS)
    assert sum(len(e.messages[-1][1]) > 400 for e in rows) > 5


@pytest.mark.parametrize("position", ["end", "start", "middle"])
def test_a_paste_holds_its_question(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.classifier.training.pastes.POSITIONS", (position,))
    text = place("one\ntwo\nthree", "Who is it?", random.Random(1))
    assert {"end": text.endswith("Who is it?"), "start": text.startswith("Who is it?"), "middle": "two" in text}[
        position
    ]
    assert "Who is it?" in text and "one" in text and "three" in text


def test_evaluation_holds_out_sources_of_custom_data() -> None:
    report = evaluate(support_examples())
    assert [score.name for score in report.sources] == ["shop-0", "shop-1", "shop-2"]
    assert report.overall[0].name == "unseen sources" and report.overall[0].rows == len(support_examples())
    assert report.overall[0].macro_f1["classifier"] > 0.8
    assert "| unseen sources |" in report.markdown()


@pytest.mark.parametrize(
    ("text", "language", "concepts"),
    [
        ("write a poem about python", "en", ["write", "poem", "about", "proglang"]),
        ("schreibe ein gedicht über python", "de", ["write", "poem", "about", "proglang"]),
        ("напиши функцию, которая печатает хокку", "ru", ["write", "function", "that", "op", "poem"]),
        ("写一首诗", "zh", ["write", "poem"]),
        ("俳句を書いて", "ja", ["poem", "write"]),
        ("하이쿠를 써줘", "ko", ["poem", "write"]),
        ("והפונקציה", "he", ["function"]),
        ("wirte a fucntion", "en", ["write", "function"]),
    ],
)
def test_lexicon_maps_languages_to_shared_concepts(text: str, language: str, concepts: list[str]) -> None:
    lexicon = Lexicon(read_lexicon())
    words = tokens(text)
    assert lexicon.resolve(text, words)[0] == language
    assert lexicon.concepts(words, *lexicon.resolve(text, words)) == concepts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("c++ and c# and f", ["c++", "and", "c#", "and", "f"]),
        ("a+b, 1 + 2", ["a", "b", "1", "2"]),
        ("python関数 naïve snake_case", ["python", "関数", "naïve", "snake_case"]),
        ("関数 in c#", ["関数", "in", "c#"]),
    ],
)
def test_tokens(text: str, words: list[str]) -> None:
    assert tokens(text) == words


@pytest.mark.parametrize(
    ("text", "language"), [("escreve conto hoy", "pt"), ("hoy conto escreve", "pt"), ("quux zzyzx", "en")]
)
def test_language_follows_most_words(text: str, language: str) -> None:
    assert Lexicon(read_lexicon()).resolve(text, tokens(text))[0] == language


def test_a_tie_between_languages_goes_to_the_first_in_reading_order() -> None:
    lexicon = Lexicon([("fr", "arbre", "tree"), ("de", "schiff", "ship"), ("de", "segel*", "sail")])
    for words in (["arbre", "schiff"], ["schiff", "arbre"]):
        assert lexicon.resolve(" ".join(words), words)[0] == {"arbre": "fr", "schiff": "de"}[words[0]]
    # A stem votes like a word and means something in its own language only.
    language, meanings = lexicon.resolve("arbre schiff segelboot", ["arbre", "schiff", "segelboot"])
    assert language == "de"
    assert lexicon.concepts(["schiff", "segelboot"], language, meanings) == ["ship", "sail"]


def test_stems_of_three_letters_match_longer_words_beside_longer_stems() -> None:
    lexicon = Lexicon([("de", "bau*", "build"), ("de", "baum*", "tree")])
    words = ["bau", "baut", "bauen", "baumhaus"]
    assert lexicon.concepts(words, *lexicon.resolve(" ".join(words), words)) == ["build", "build", "build", "tree"]


@pytest.mark.parametrize(
    ("text", "marks"),
    [("plain prose. really", 0), ("a.json", 2), ("x.js, y.py", 2), ("if (a == b) { f(); }", 5), ("a --b", 2)],
)
def test_code_marks(text: str, marks: int) -> None:
    assert _code_marks(text) == marks


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! v1.2 ok?", ("One. ", "Two! ", "v1.2 ok?")),
        ("写诗。 好的。再见", ("写诗。", " 好的。", "再见")),
        ("wait...   what", ("wait...   ", "what")),
    ],
)
def test_sentences_end_at_marks(text: str, sentences: tuple[str, ...]) -> None:
    assert read_request(text).sentences == sentences


def test_questions_are_found_between_the_windows_and_few_marks_are_tried() -> None:
    line = "Nothing is asked in this line of the paste. "
    request = read_request(f"{line * 40}\nWho paid for it? {line * 40}")
    assert [request.sentences[i] for i in request.middle] == ["Who paid for it?"]
    assert not read_request("?" * 100_000).middle
