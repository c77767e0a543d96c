"""Files of JSON lines as people have them, through all that reads some: read, counted or refused, never a traceback."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.heads.format import backbone_fingerprint
from backends.json_lines import read_objects
from backends.models.tiny import tiny_model, tiny_tokenizer
from backends.training.backbone import Backbone
from backends.training.checkpoint import TrainingError
from backends.training.data.answers import read_prompts
from backends.training.data.cleaning import CleaningOptions
from backends.training.data.dataset import Answer, AnswersError, read_answers
from backends.training.distill import AnswerOptions, TrainingRun, answer_prompts, training_states
from backends.training.states import held_out_answers
from backends.training.trainer import TrainingOptions
from gateway.classifier import PromptClassifier
from gateway.classifier.training.dataset import DataError, read_examples
from gateway.classifier.training.dataset import read_prompts as read_requests
from tests.support.engine_helpers import one_thread

__all__ = ["one_thread"]

VOCAB = 260


def line(id: Any, prompt: str = "hello", **others: Any) -> str:
    return json.dumps({"id": id, "prompt": prompt, **others}, ensure_ascii=False)


FIVE = [line(f"p{i}") for i in range(5)]


def text_of(*lines: str) -> str:
    return "".join(f"{each}\n" for each in lines)


def write(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


READ = {
    "plain": text_of(*FIVE).encode(),
    "no line end": "\n".join(FIVE).encode(),
    "byte order mark": text_of(*FIVE).encode("utf-8-sig"),
    "CRLF": "\r\n".join(FIVE).encode(),
    "blank lines": text_of("", FIVE[0], "  \t", *FIVE[1:], "", "").encode(),
    "gzip": gzip.compress(text_of(*FIVE).encode()),
    "gzip in two parts": gzip.compress(text_of(*FIVE[:2]).encode()) + gzip.compress(text_of(*FIVE[2:]).encode()),
}


@pytest.mark.parametrize("content", READ.values(), ids=READ)
@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.txt"])
def test_what_is_read(tmp_path: Path, content: bytes, name: str) -> None:
    assert [each["id"] for each in read_prompts(write(tmp_path, content, name))] == [f"p{i}" for i in range(5)]


def test_characters_that_end_lines_elsewhere_are_text(tmp_path: Path) -> None:
    prompt = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    assert read_prompts(write(tmp_path, text_of(line(7, prompt))))[0] == {"id": "7", "prompt": prompt}


REFUSED = {
    "same id": (text_of(*FIVE, line("p1", "other")), ":6: id 'p1' is that of line 2 too"),
    "number and text": (text_of(*FIVE, "", line(1), line("1")), ":8: id '1' is that of line 7 too"),
    "cut off": (text_of(*FIVE) + '{"id": "last", "prompt": "lo', ":6: not JSON (Unterminated string"),
    "cut off in the middle": (text_of(FIVE[0], '{"id": "x"', FIVE[1]), ":2: not JSON"),
    "array": (json.dumps([json.loads(each) for each in FIVE]), ":1: list instead of an object"),
    "messages": (text_of(*FIVE, '{"id": "m", "messages": []}'), ':6: needs "id" and "prompt"'),
    "no id": (text_of('{"prompt": "a"}'), ':1: needs "id"'),
    "id of another kind": (text_of(*FIVE, line([1])), ":6: id must be a string or a whole number"),
    "true for an id": (text_of(line(True)), ":1: id must be"),
    "label of another kind": (text_of(line("a", label=["x"])), ":1: label must be a string"),
    "licence of another kind": (text_of(line("a", licence={})), ":1: licence must be a string"),
    "Latin-1": ((text_of(*FIVE) + line("l", "caf\u00e9")).encode("latin-1"), ":6: not UTF-8 (byte 0xe9 at place 27)"),
    "UTF-16": (text_of(*FIVE).encode("utf-16"), ":1: not UTF-8 but UTF-16"),
    "UTF-16 without a mark": (text_of(*FIVE).encode("utf-16-le"), ":1: not UTF-8 but UTF-16"),
    "UTF-32": (text_of(*FIVE).encode("utf-32"), ":1: not UTF-8 but UTF-16 or UTF-32"),
    "half a pair": (text_of(FIVE[0], '{"id": "s", "prompt": "a\\ud800"}'), ":2: a string holds half a surrogate"),
    "deep": (text_of(FIVE[0], "[" * 100_000), ":2: nested too deeply"),
    "a number too long": (text_of('{"id": ' + "1" * 5000 + "}"), ":1: not JSON"),
    "nothing": ("", ": no prompts in it"),
    "blank lines only": ("\n\n", ": no prompts in it"),
    "gzip cut off": (gzip.compress(text_of(*FIVE).encode())[:-9], ": the file is cut off or damaged here"),
    "gzip damaged": (gzip.compress(text_of(*FIVE).encode())[:-8] + b"12345678", ": the file is cut off or damaged"),
}


@pytest.mark.parametrize(("content", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_in_one_line_with_its_number(tmp_path: Path, content: str | bytes, told: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(AnswersError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert told in message
    assert "\n" not in message


def test_what_a_killed_writer_left_is_passed_over_where_it_is_our_own(tmp_path: Path) -> None:
    whole = text_of(*FIVE)
    for content in (whole.encode() + b'{"id": "x', gzip.compress(whole.encode()) + gzip.compress(b"{}")[:-5]):
        path = write(tmp_path, content)
        assert len(list(read_objects(path, AnswersError, torn_end=True))) == 5
    path = write(tmp_path, text_of(FIVE[0], "{", FIVE[1]))
    with pytest.raises(AnswersError, match=":2: not JSON"):
        list(read_objects(path, AnswersError, torn_end=True))


def answer(id: Any = "a", prompt_ids: Any = (5, 6), answer_ids: Any = (7, 8, 9), **others: Any) -> str:
    return json.dumps({"id": id, "prompt_ids": prompt_ids, "answer_ids": answer_ids, **others})


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (answer(answer_ids=[7, 260]), "token 260 of answer_ids is outside the vocabulary of 260"),
        (answer(prompt_ids=[-1]), "token -1 of prompt_ids is outside"),
        (answer(answer_ids="abc"), "answer_ids must be a list of token ids"),
        (answer(answer_ids=[1.5, 2]), "answer_ids must be a list of token ids"),
        (answer(answer_ids=[True, 2]), "answer_ids must be a list of token ids"),
        (answer(prompt_ids=None), "prompt_ids must be a list"),
        (answer(prompt_ids=[10**30]), "is outside the vocabulary"),
        (answer(id=None), "id must be"),
        (answer(label=3), "label must be a string"),
        (answer(temperature="hot"), "temperature must be a number"),
        (answer(temperature=float("nan")), "temperature must be a number"),
        (line("p", "a prompt"), "no prompt_ids and no answer_ids"),
    ],
)
def test_answers_that_are_refused(tmp_path: Path, record: str, told: str) -> None:
    path = write(tmp_path, text_of(answer(), "", record))
    with pytest.raises(AnswersError) as caught:
        read_answers([path], vocab_size=VOCAB)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert told in str(caught.value)


def test_answers_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, text_of(answer(), answer(answer_ids=[1]), answer(prompt_ids=[]), answer(prompt_ids=[1] * 9)))
    told: list[str] = []
    assert len(read_answers([path], vocab_size=VOCAB, max_length=10, log=told.append)) == 1
    assert told == [
        f"{path}: 2 of 4 answers left out: without a prompt, or of fewer than 2 tokens",
        f"{path}: 1 of 4 answers left out: longer than the model's 10 tokens",
    ]
    with pytest.raises(AnswersError, match="no answers in it"):
        read_answers([write(tmp_path, "")])


# Before anything is generated.


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    model = tiny_model()
    return Backbone("tiny", model, tiny_tokenizer(), backbone_fingerprint(model))


def run_of(folder: Path, **given: Any) -> TrainingRun:
    options = TrainingOptions(num_heads=2, inner_size=16, epochs=1)
    return TrainingRun(
        **{"prompts": None, "answers": (), "out": folder / "heads", "work_dir": folder / "work", **given},
        options=options,
    )


def held_out(id: int) -> bool:
    return Answer(str(id), "", (), ()).held_out


def test_ids_tell_that_nothing_is_held_out(tmp_path: Path, backbone: Backbone) -> None:
    path = write(tmp_path, text_of(*(line(i) for i in range(40) if not held_out(i))))
    with pytest.raises(TrainingError, match=r"none of the .* prompts are held out"):
        training_states(backbone, run_of(tmp_path, prompts=path), log=lambda _: None)
    assert not (tmp_path / "work").exists(), "no answer was made"


def test_prompts_that_are_held_out_all_leave_nothing_to_train_on(tmp_path: Path, backbone: Backbone) -> None:
    path = write(tmp_path, text_of(*(line(i) for i in range(400) if held_out(i))))
    with pytest.raises(TrainingError, match=r"all of the .* prompts are held out"):
        training_states(backbone, run_of(tmp_path, prompts=path), log=lambda _: None)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("given", ["answers", "prompts beside answers"])
def test_a_bad_file_is_told_before_anything_is_trained(tmp_path: Path, backbone: Backbone, given: str) -> None:
    good = write(tmp_path, text_of(*(answer(i, answer_ids=list(range(10, 30))) for i in range(60))), "good.jsonl")
    bad = write(tmp_path, text_of(answer()).encode() + b"\xe9", "bad.jsonl")
    run = (
        run_of(tmp_path, answers=(good, bad)) if given == "answers" else run_of(tmp_path, answers=(good,), prompts=bad)
    )
    with pytest.raises(AnswersError, match=r"bad\.jsonl:"):
        training_states(backbone, run, log=lambda _: None)
    assert not (tmp_path / "work").exists()


def test_nothing_left_to_train_on_is_told_with_the_reason(tmp_path: Path, backbone: Backbone) -> None:
    path = write(tmp_path, text_of(*(answer(i) for i in range(60))))
    with pytest.raises(TrainingError, match=r"of 60 answers \d+ are held out for the evaluation; dropped: 5\d short"):
        training_states(backbone, run_of(tmp_path, answers=(path,)), log=lambda _: None)
    assert not (tmp_path / "work").exists(), "no hidden state was computed"
    kept = run_of(tmp_path, answers=(path,), cleaning=CleaningOptions(min_tokens=0))
    with pytest.raises(TrainingError, match="held out"):
        training_states(backbone, run_of(tmp_path, answers=(write(tmp_path, text_of(answer("one")), "1"),)), log=print)
    assert training_states(backbone, kept, log=lambda _: None).training_indices


def test_an_evaluation_counts_what_it_leaves_out(tmp_path: Path, backbone: Backbone) -> None:
    path = write(tmp_path, text_of(*(answer(i, answer_ids=[1]) for i in range(60))))
    told: list[str] = []
    with pytest.raises(AnswersError, match="held-out 5%"):
        held_out_answers(backbone, [path], told.append)
    assert told == [f"{path}: 60 of 60 answers left out: without a prompt, or of fewer than 2 tokens"]


def test_prompts_that_are_too_long_are_counted(tmp_path: Path, backbone: Backbone) -> None:
    path = write(tmp_path, text_of(*FIVE[:2], line("long", "x" * 600)))
    told: list[str] = []
    options = AnswerOptions(max_new_tokens=4)
    answer_prompts(backbone, path, tmp_path / "a.jsonl", options, log=told.append)
    assert told[0] == (f"{path}: 1 of 3 prompts left out: longer than 512 tokens, or without room for 4 new ones")
    assert {each.id for each in read_answers([tmp_path / "a.jsonl"])} == {"p0", "p1"}
    # Again, and with a name that doesn't say that it is packed: nothing is answered twice.
    answer_prompts(backbone, path, tmp_path / "a.jsonl", options, log=told.append)
    assert len(read_answers([tmp_path / "a.jsonl"])) == 2
    with pytest.raises(AnswersError, match="all 1 prompts are longer than 512 tokens"):
        answer_prompts(backbone, write(tmp_path, text_of(line("x", "y" * 900))), tmp_path / "b", options, log=print)


@pytest.mark.parametrize("content", [text_of(*FIVE), "my notes", "my\nnotes"])
def test_answers_are_not_written_over_something_else(tmp_path: Path, backbone: Backbone, content: str) -> None:
    path = write(tmp_path, content, "kept")
    prompts = write(tmp_path, text_of(*FIVE))
    with pytest.raises(AnswersError, match="give the name of a new file"):
        answer_prompts(backbone, prompts, path, AnswerOptions(max_new_tokens=4), log=print)
    assert path.read_text() == content


# Whatever the bytes are.


def read_all_requests(path: Path) -> None:
    with path.open("rb") as file:
        for request in read_requests(str(path), file):
            CLASSIFIER.classify(request)


CLASSIFIER = PromptClassifier.load()
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "prompts": (read_prompts, text_of(*FIVE, line(9, "caf\u00e9 \u2028", label="code", source="s"))),
    "answers": (
        lambda path: read_answers([path], vocab_size=VOCAB),
        text_of(*(answer(i, temperature=0.7, label="x") for i in range(6))),
    ),
    "examples": (
        read_examples,
        text_of(*(json.dumps({"prompt": "hi", "label": "chat", "lang": "en"}) for _ in "12345")),
    ),
    "requests": (
        read_all_requests,
        text_of(
            '{"prompt": "caf\u00e9"}',
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}',
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
        ),
    ),
}
ODD = [
    None,
    True,
    -1,
    1e400,
    "",
    "x",
    [],
    [None],
    [[]],
    {},
    {"a": {}},
    "\u0000",
    [{"type": "text"}],
    [{"role": "user"}],
]


@pytest.mark.parametrize("reader", READERS)
def test_no_bytes_end_in_a_traceback(tmp_path: Path, reader: str) -> None:
    read, content = READERS[reader]
    read(write(tmp_path, content))
    drawn = random.Random(reader)
    whole, refused = content.encode(), 0
    pieces = [
        b"\xff",
        b"\x00",
        b"\xef\xbb\xbf",
        b"\n",
        b"\r",
        b'"',
        b"{",
        b"]",
        b"\\ud83d",
        b"9" * 40,
        b"null",
        b"\xe2\x80",
    ]
    for _ in range(150):
        mutant = whole
        for _ in range(drawn.randint(1, 3)):
            at = drawn.randrange(len(mutant) + 1)
            mutant = mutant[:at] + drawn.choice(pieces) + mutant[at + drawn.choice([0, 1, 20]) :]
        mutant = mutant[: drawn.choice([len(mutant), drawn.randrange(len(mutant) + 1)])]
        if drawn.random() < 0.2:
            mutant = gzip.compress(mutant)[: -drawn.randint(1, 12)]
        refused += is_refused(read, write(tmp_path, mutant))
    assert refused > 50
    records = [json.loads(each) for each in content.rstrip().split("\n")]
    for record in records:
        for key in record:
            for odd in ODD:
                is_refused(read, write(tmp_path, json.dumps({**record, key: odd}) + "\n"))


def is_refused(read: Callable[[Path], object], path: Path) -> bool:
    """Any other error than a refusal in one line is the test's to fail with."""
    try:
        read(path)
    except (AnswersError, DataError) as error:
        assert "\n" not in str(error)
        return True
    return False
