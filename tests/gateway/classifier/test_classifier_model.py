"""The shipped classifier: its answers, its robustness on odd input, and its artifact."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

from gateway.classifier import ArtifactError, PromptClassifier
from gateway.classifier.model import DEFAULT_ARTIFACT, load_arrays, save_arrays
from gateway.classifier.training.dataset import Example, shipped_sets

FENCE = "```"


@pytest.fixture(scope="module")
def classifier() -> PromptClassifier:
    return PromptClassifier.load()


ODD = {
    "empty": "",
    "blank": " \n\t ",
    "binary-like": "\x00\x01\x02\xff\xfe" * 200,
    "replacement characters": "\ufffd" * 500,
    "lone surrogate": "write \ud800 code",
    "emoji only": "🎉🔥👩‍👩‍👧‍👦🇫🇷",
    "punctuation": "?!.,;:()[]{}",
    "only a fence": FENCE,
    "open fence": f"{FENCE}python\nx = 1",
    "right to left marks": "\u202e\u202bاكتب\u202c",
    "combining marks": "a" + "\u0301" * 5_000,
    "one long word": "a" * 100_000,
    "one long line of code": "f(" * 50_000,
    "many lines": "\n" * 100_000,
    "1 MB of prose": "the quick brown fox jumps. " * 40_000,
    "1 MB of Chinese": "从前有座山。" * 170_000,
    "1 MB of spaces": " " * 1_000_000,
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_odd_prompts_get_an_answer(classifier: PromptClassifier, text: str) -> None:
    result = classifier.classify(text)
    assert result.label in classifier.labels
    assert result.probabilities.keys() == set(classifier.labels)
    assert sum(result.probabilities.values()) == pytest.approx(1.0)
    assert result.probabilities[result.label] == max(result.probabilities.values())
    result.explain()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "system", "content": "You write SQL."}],
        [{"role": "assistant", "content": "Hello."}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "42", "tool_call_id": "a"}],
    ],
)
def test_odd_conversations_get_an_answer(classifier: PromptClassifier, messages: list) -> None:
    assert classifier.classify(messages).label in classifier.labels


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Write a poem about Python", "creative"),
        ("Write a Python function that prints a poem", "code"),
        ("写一首关于Python的诗", "creative"),
        ("写一个打印俳句的函数", "code"),
        ("Pythonについての詩を書いてください", "creative"),
        ("俳句を表示する関数を書いてください", "code"),
        ("Écris un poème sur Python", "creative"),
        ("Écris une fonction qui affiche un haïku", "code"),
        ("اكتب قصيدة عن بايثون", "creative"),
        ("כתוב פונקציה שמדפיסה הייקו", "code"),
        (f"What does this do?\n{FENCE}python\nprint(1)\n{FENCE}", "chat"),
        (f"{FENCE}python\nprint(1)\n{FENCE}\nConvert it to Rust.", "code"),
        ("how do I drop a column in pandas", "code"),
        ("how do I drop off a parcel", "chat"),
        ("The king lost his crown. The fox found it.\n\nSummarize the story.", "chat"),
        ("The king lost his crown. The fox found it.\n\nContinue the story.", "creative"),
        ("regex for a hex colour", "code"),
    ],
)
def test_label_follows_the_form_of_the_answer(classifier: PromptClassifier, text: str, label: str) -> None:
    assert classifier.classify(text).label == label


@pytest.mark.parametrize(
    ("instruction", "label"), [("Write a poem about this.", "creative"), ("Summarize this.", "chat")]
)
def test_instruction_at_the_end_of_a_long_paste(classifier: PromptClassifier, instruction: str, label: str) -> None:
    paste = "The city council approved a new budget of 4.2 million on Tuesday. " * 2_000
    assert classifier.classify(f"{paste}\n\n{instruction}").label == label


LINES = "The council met on Tuesday. Nobody knew what the old key was for. Prices rose by 3 percent.\n"


@pytest.mark.parametrize("lines", [6, 20, 60, 5_000])
@pytest.mark.parametrize("place", ["start", "middle", "end"])
@pytest.mark.parametrize(
    ("question", "label"),
    [
        ("Who is the author of this, and what does it say about the key?", "chat"),
        ("Can you turn this into a poem?", "creative"),
        ("Can you write a Python script that counts the words in it?", "code"),
    ],
)
def test_length_does_not_swamp_the_question(
    classifier: PromptClassifier, lines: int, place: str, question: str, label: str
) -> None:
    # In a very long paste only a stretch behind the head and one before the tail is looked through.
    before = {"start": 0, "middle": min(lines // 2, 25), "end": lines}[place]
    text = f"{LINES * before}\n{question}\n\n{LINES * (lines - before)}".strip()
    assert classifier.classify(text).label == label


def test_content_parts_count_as_their_text(classifier: PromptClassifier) -> None:
    parts = [{"type": "text", "text": "Write a haiku about rain"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert classifier.classify([{"role": "user", "content": parts}]).label == "creative"


def test_last_user_turn_outweighs_the_rest(classifier: PromptClassifier) -> None:
    messages = [
        {"role": "system", "content": "You are an expert programmer. Write code."},
        {"role": "user", "content": "Write a Python function that sorts a list."},
        {"role": "assistant", "content": f"{FENCE}python\nsorted(x)\n{FENCE}"},
        {"role": "user", "content": "Write a short love poem about the moon for my wife."},
    ]
    assert classifier.classify(messages).label == "creative"


def test_a_follow_up_takes_the_class_of_the_conversation(classifier: PromptClassifier) -> None:
    def probability(first: str, answer: str, label: str) -> float:
        turns = [("user", first), ("assistant", answer), ("user", "make it shorter")]
        messages = [{"role": role, "content": content} for role, content in turns]
        return classifier.classify(messages).probabilities[label]

    code = ("Write a Python function that sorts a list.", f"{FENCE}python\nsorted(x)\n{FENCE}")
    poem = ("Write a poem about the sea.", "The sea is wide.")
    assert probability(*code, "code") > probability(*poem, "code")
    assert probability(*poem, "creative") > probability(*code, "creative")


def test_classifying_is_deterministic(classifier: PromptClassifier) -> None:
    again = PromptClassifier.load()
    for text in ("Write a poem", "sort a list in go", "why is the sky blue?", "写诗"):
        assert classifier.classify(text).probabilities == again.classify(text).probabilities


def test_explanation_names_features_that_spoke_for_the_label(classifier: PromptClassifier) -> None:
    features = classifier.classify("Write a poem about the sea").explain(limit=5)
    assert 0 < len(features) <= 5
    assert any("poem" in feature.feature for feature in features)
    assert [f.score for f in features] == sorted((f.score for f in features), reverse=True)
    assert all(feature.score > 0 for feature in features)


def test_uncertain_follows_the_threshold(classifier: PromptClassifier) -> None:
    results = [classifier.classify(text) for text in ("", "hm", "Write a Python function that reverses a string.")]
    for result in results:
        assert result.uncertain == (max(result.probabilities.values()) < classifier.uncertain_below)
    assert results[0].uncertain and not results[-1].uncertain


# Floors a little under what the card reports, so that a worse artifact doesn't slip in.
FLOORS = {
    "tricky": 0.92,
    "tricky_fresh": 0.82,
    "multilingual": 0.95,
    "multilingual_fresh": 0.91,
    "kind_data_questions": 0.75,
    "kind_letters_essays": 0.85,
    "kind_long_pastes": 0.9,
    "kind_maths": 0.93,
    "kind_personas": 0.6,
    "kind_plain_code": 0.72,
    "kind_slogans_verse": 0.8,
    "kind_tool_agents": 0.8,
    "kind_topics": 0.85,
}


@pytest.mark.parametrize("name", FLOORS)
def test_shipped_evaluation_sets(classifier: PromptClassifier, name: str) -> None:
    rows: list[Example] = shipped_sets()[name]
    predicted = [classifier.classify(row.chat()).label for row in rows]
    labels = sorted({row.label for row in rows})
    assert f1_score([row.label for row in rows], predicted, labels=labels, average="macro") >= FLOORS[name]


def test_artifact_is_small_and_holds_plain_arrays_only() -> None:
    assert DEFAULT_ARTIFACT.stat().st_size < 5_000_000
    with np.load(DEFAULT_ARTIFACT, allow_pickle=False) as stored:
        assert {stored[name].dtype.kind for name in stored} <= {"f", "u"}


def test_artifact_round_trip(tmp_path: Path) -> None:
    arrays = load_arrays(DEFAULT_ARTIFACT)
    save_arrays(arrays, tmp_path / "copy.npz")
    copy = load_arrays(tmp_path / "copy.npz")
    assert copy.labels == arrays.labels and copy.keys == arrays.keys and copy.lexicon == arrays.lexicon
    assert np.array_equal(copy.weights, arrays.weights)


def _damage_nothing(path: Path) -> None:
    path.unlink(missing_ok=True)


def _damage_text(path: Path) -> None:
    path.write_text("hello")


def _damage_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.npy", b"not an array")


def _damage_pickle(path: Path) -> None:
    np.savez(path, meta=np.array([{"a": 1}], dtype=object))


def _damage_missing(path: Path) -> None:
    np.savez(path, bias=np.zeros(3))


@pytest.mark.parametrize("damage", [_damage_nothing, _damage_text, _damage_zip, _damage_pickle, _damage_missing])
def test_a_bad_artifact_is_refused_by_name(tmp_path: Path, damage) -> None:
    path = tmp_path / "classifier.npz"
    damage(path)
    with pytest.raises(ArtifactError, match=r"classifier\.npz.*classifier train"):
        PromptClassifier.load(path)


def test_an_artifact_of_another_features_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.classifier.model.FEATURES_VERSION", 999)
    with pytest.raises(ArtifactError, match="features version"):
        PromptClassifier.load()
