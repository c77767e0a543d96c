"""Cost tables from one start to the next: what is believed, what is ignored, and who keeps it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cost.calibration import Calibration
from backends.cost.persistence import CostKeeping
from backends.cost.probe import Measured
from backends.cost.record import MOST_AGE_S, CostRecord, UnusableRecord, judge, key_of, read_record, restless
from backends.cost.step_cost import StepCost
from backends.cost.stores import CostStore, FolderStore
from policy.shared.cost_tables import TTL_S, RedisCostStore
from policy.shared.redis_client import connect, parse_redis_url
from tests.support.valkey import ValkeyProcess

FACTS = {"device": "a CPU", "cores": "2", "dtype": "bfloat16"}
TABLE = StepCost(rows=((1, 8.0), (8, 11.0), (32, 28.0)), heads=((1, 0.7), (4, 0.9)))
NOW = 1_800_000_000.0
SAME = [(1, 8.0), (8, 11.0), (32, 28.0)]


@dataclass
class ScriptedProbe:
    """A device on which a step takes ``speed`` times what :data:`TABLE` says."""

    speed: float = 1.0
    busy: bool = False
    measured: int = 0
    checked: int = 0

    def measure(self) -> Measured:
        self.measured += 1
        return Measured(StepCost(tuple((n, ms * self.speed) for n, ms in TABLE.rows), TABLE.heads), True, self.busy)

    def check(self) -> list[tuple[int, float]]:
        self.checked += 1
        return [(rows, ms * self.speed) for rows, ms in SAME]


@dataclass
class Shelf:
    """A store in memory, which may be broken."""

    texts: dict[str, str] = field(default_factory=dict)
    broken: bool = False

    def load(self, key: str) -> str | None:
        if self.broken:
            raise OSError("no such shelf")
        return self.texts.get(key)

    def save(self, key: str, text: str) -> None:
        if self.broken:
            raise OSError("no such shelf")
        self.texts[key] = text


def keeping(*stores: CostStore, now: float = NOW, anew: bool = False) -> CostKeeping:
    return CostKeeping(FACTS, stores, lambda: now, measure_anew=anew)


def record(measured_at: float = NOW, cost: StepCost = TABLE, **more: Any) -> CostRecord:
    return CostRecord(FACTS, measured_at, cost, **more)


# The text.


@given(
    st.dictionaries(st.integers(1, 500), st.floats(0.001, 1e4), min_size=1, max_size=12),
    st.dictionaries(st.integers(1, 64), st.floats(0.001, 1e3), max_size=5),
    st.dictionaries(st.integers(1, 8), st.floats(0.8, 2.0), max_size=5),
)
def test_a_record_comes_back_as_it_was(rows: dict[int, float], heads: dict[int, float], factors: Any) -> None:
    cost = StepCost.from_measurements(list(rows.items()), list(heads.items()))
    found = read_record(CostRecord(FACTS, NOW, cost, factors).text(), dict(reversed(FACTS.items())), NOW)
    assert [size for size, _ in found.cost.rows] == [size for size, _ in cost.rows]
    assert [ms for _, ms in found.cost.rows] == pytest.approx([ms for _, ms in cost.rows], abs=1e-6)
    assert dict(found.cost.heads) == pytest.approx(dict(cost.heads), abs=1e-6)
    assert dict(found.factors) == pytest.approx(factors, abs=1e-6)


def damaged(**changes: Any) -> str:
    return json.dumps({**json.loads(record().text()), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "damaged"),
        ("not JSON", "damaged"),
        ("[]", "no JSON object"),
        ("{}", "damaged"),
        (record().text()[:-20], "damaged"),
        (damaged(version=99), "version 99"),
        (damaged(facts={**FACTS, "cores": "64", "gpu": "x"}), "cores, gpu differ"),
        (damaged(facts=None), "damaged"),
        (damaged(measured_at=NOW - MOST_AGE_S - 1), "30.0 days ago"),
        (damaged(measured_at=NOW + 3600), "days ago"),
        (damaged(measured_at="yesterday"), "damaged"),
        (damaged(rows_ms=[]), "not ascending"),
        (damaged(rows_ms=[[8, 1.0], [1, 2.0]]), "not ascending"),
        (damaged(rows_ms=[[1, 2.0], [8, 1.0]]), "not ascending"),
        (damaged(rows_ms=[[0, 2.0]]), "not ascending"),
        (damaged(rows_ms=[[1, 0.0]]), "positive"),
        (damaged(rows_ms=[[1, -1.0]]), "positive"),
        (damaged(rows_ms=[[1, "nan"]]), "positive"),
        (damaged(heads_ms=[[1]]), "damaged"),
        (damaged(factors={"1": float("inf")}), "positive"),
        (damaged(factors=[1]), "damaged"),
    ],
)
def test_a_text_that_is_no_table_for_this_device_is_told_from_one(text: str, why: str) -> None:
    with pytest.raises(UnusableRecord, match=why):
        read_record(text, FACTS, NOW)


FIELDS = st.sampled_from(["version", "facts", "measured_at", "rows_ms", "heads_ms", "factors", "x"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner),
    )
)
def test_any_other_json_is_refused_in_the_same_way(value: Any) -> None:
    with pytest.raises(UnusableRecord):
        read_record(json.dumps(value), FACTS, NOW)


def test_the_key_is_that_of_the_facts() -> None:
    assert key_of(FACTS) == key_of(dict(reversed(FACTS.items())))
    assert len({key_of({**FACTS, name: "other"}) for name in FACTS} | {key_of(FACTS)}) == 4


# What is believed.


@pytest.mark.parametrize(
    ("found", "trusted"),
    [
        (SAME, True),
        ([(rows, ms * 1.4) for rows, ms in SAME], True),  # a slower moment, all alike
        ([(rows, ms * 1.6) for rows, ms in SAME], False),
        ([(rows, ms * 0.6) for rows, ms in SAME], False),  # the table is from a busy moment
        ([(1, 8.0), (8, 11.0), (32, 36.0)], False),  # more rows have become dear
        ([(1, 11.0), (8, 11.0), (32, 28.0)], False),
        ([(1, 8.8), (8, 11.0), (32, 26.0)], True),  # noise
    ],
)
def test_a_kept_table_is_believed_if_the_device_agrees(found: list[tuple[int, float]], trusted: bool) -> None:
    assert judge(TABLE, found).trusted is trusted


def test_runs_that_differ_make_a_restless_measurement() -> None:
    assert not restless({1: [8.0, 8.1, 9.9, 8.2, 8.0], 8: [11.0, 11.3, 11.2, 11.0, 40.0]})
    assert restless({1: [8.0, 12.0, 13.0, 8.1, 12.0], 8: [11.0, 17.0, 16.0, 15.9, 40.0]})


# What a start does.


def test_the_second_start_measures_nothing() -> None:
    shelf, first, second = Shelf(), ScriptedProbe(), ScriptedProbe()
    keeping(shelf).open(first)
    assert (first.measured, first.checked) == (1, 0)
    found = keeping(shelf, now=NOW + 60).open(second)
    assert (second.measured, second.checked) == (0, 1)
    assert found.cost == TABLE and found.measured_at == NOW


def test_a_table_of_a_busy_moment_is_replaced_at_the_first_quiet_start() -> None:
    slow = replace(record(), cost=ScriptedProbe(speed=1.8).measure().cost)
    shelf, probe = Shelf({key_of(FACTS): slow.text()}), ScriptedProbe()
    assert keeping(shelf).open(probe).cost == TABLE
    assert probe.measured == 1
    assert read_record(shelf.texts[key_of(FACTS)], FACTS, NOW).cost == TABLE


def test_what_is_measured_in_a_busy_moment_is_used_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    table = keeping(shelf)
    found = table.open(ScriptedProbe(speed=3.0, busy=True))
    assert found.cost.forward_ms(1) == pytest.approx(24.0)
    assert not table.refine({1: 1.4})
    assert not shelf.texts
    assert "busy moment" in caplog.text


def test_in_a_busy_moment_the_kept_table_is_used_although_it_does_not_hold(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf({key_of(FACTS): record().text()})
    table = keeping(shelf)
    found = table.open(ScriptedProbe(speed=90.0, busy=True))
    assert found.cost == TABLE
    assert "the kept one is used after all" in caplog.text
    assert not table.refine({1: 1.4}), "what such a moment teaches is not kept"
    assert read_record(shelf.texts[key_of(FACTS)], FACTS, NOW) == record()


def test_measuring_anew_looks_at_nothing_and_replaces_it() -> None:
    old = record(NOW - 60, replace(TABLE, heads=()))
    shelf, probe = Shelf({key_of(FACTS): old.text()}), ScriptedProbe()
    keeping(shelf, anew=True).open(probe)
    assert (probe.measured, probe.checked) == (1, 0)
    assert read_record(shelf.texts[key_of(FACTS)], FACTS, NOW).cost == TABLE


def test_the_newest_of_several_is_taken_and_given_to_those_that_lack_it() -> None:
    older, newer = replace(TABLE, heads=((1, 0.5),)), TABLE
    mine = Shelf({key_of(FACTS): record(NOW - 500, older).text()})
    shared, empty = Shelf({key_of(FACTS): record(NOW - 5, newer).text()}), Shelf()
    assert keeping(mine, shared, empty).open(ScriptedProbe()).cost == newer
    assert mine.texts == shared.texts == empty.texts


def test_a_corrupt_or_foreign_table_and_a_broken_store_are_ignored_and_said(caplog: pytest.LogCaptureFixture) -> None:
    corrupt, foreign = Shelf({key_of(FACTS): "{"}), Shelf({key_of(FACTS): damaged(facts={"device": "other"})})
    probe = ScriptedProbe()
    assert keeping(corrupt, foreign, Shelf(broken=True)).open(probe).cost == TABLE
    assert probe.measured == 1
    for word in ("damaged", "another device", "no such shelf"):
        assert word in caplog.text, word
    assert corrupt.texts == foreign.texts, "both hold the new table now"


def test_what_serving_taught_is_kept_and_taken_over() -> None:
    shelf = Shelf()
    table = keeping(shelf)
    table.open(ScriptedProbe())
    assert table.refine({1: 1.1, 3: 1.3})
    assert not table.refine({1: 1.105, 3: 1.3}), "no news"
    assert table.refine({1: 1.2})
    found = keeping(shelf).open(ScriptedProbe())
    assert found.factors == {1: 1.2, 3: 1.3} and found.cost == TABLE
    assert Calibration(start=found.factors).factor(4) == 1.3


def test_calibration_hands_on_what_enough_steps_have_shown() -> None:
    calibration = Calibration(start={1: 1.5, 2: 9.0})
    assert calibration.factor(1) == 1.5 and calibration.factor(2) == 2.0 and calibration.factor(8) == 1.0
    for step in range(60):
        calibration.observe(4, drafting=step % 4 < 3, predicted_ms=10.0, measured_ms=12.0 if step % 4 < 3 else 10.0)
        if step == 20:
            assert calibration.learned() == {}
    assert calibration.learned() == {3: pytest.approx(1.2)}
    assert calibration.factor(1) == 1.5, "another size still goes by what was handed over"


# Where it lies.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey")).start()
    yield server
    server.kill()


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CostStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "new" / "folder")
    running: ValkeyProcess = request.getfixturevalue("server")
    return RedisCostStore(parse_redis_url(f"{running.url}?namespace={request.node.name.replace('[', '-').strip(']')}"))


def test_every_store_keeps_texts_by_key(store: CostStore) -> None:
    assert store.load("a") is None
    store.save("a", "one")
    store.save("b", "two")
    store.save("a", "three")
    assert (store.load("a"), store.load("b")) == ("three", "two")


async def test_in_redis_a_table_expires(server: ValkeyProcess) -> None:
    import asyncio

    target = parse_redis_url(f"{server.url}?namespace=expiry")
    await asyncio.to_thread(RedisCostStore(target).save, "a", "one")
    client: Any = connect(target)
    (key,) = [key async for key in client.scan_iter("{expiry}*")]
    assert 0 < await client.ttl(key) <= TTL_S
    await client.aclose()


def test_a_store_that_cannot_be_had_is_no_reason_not_to_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    nowhere = RedisCostStore(parse_redis_url("redis://:secret@127.0.0.1:1/0"))
    probe = ScriptedProbe()
    keeping(FolderStore(tmp_path / "file"), nowhere).open(probe)
    assert probe.measured == 1
    assert "127.0.0.1:1" in caplog.text and "secret" not in caplog.text


def test_a_file_that_is_no_text_is_ignored(tmp_path: Path) -> None:
    store, probe = FolderStore(tmp_path), ScriptedProbe()
    (tmp_path / f"{key_of(FACTS)}.json").write_bytes(os.urandom(500))
    keeping(store).open(probe)
    assert probe.measured == 1
    assert read_record(store.load(key_of(FACTS)) or "", FACTS, NOW).cost == TABLE
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}, "nothing half-written stays"


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "a.json").mkdir()  # nothing can be moved there
    for text in ("one", "not to be encoded: \ud800"):
        with pytest.raises((OSError, ValueError)):
            store.save("a", text)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# Guesses.

PART = StepCost.from_measurements([(1, 4.0), (8, 6.0), (32, 24.0)], guessed=[32])


@dataclass
class PartProbe(ScriptedProbe):
    """There was no time for the largest size."""

    in_time: bool = True

    def measure(self) -> Measured:
        return Measured(PART, self.in_time, self.busy)


def test_what_was_not_measured_is_guessed_by_a_table_of_other_weights_on_the_same_machine() -> None:
    facts = {**FACTS, "model": "m", "heads": "h", "runner": "native"}
    shelf = Shelf()
    CostKeeping({**facts, "dtype": "float32", "threads": "2"}, [shelf], lambda: NOW).open(ScriptedProbe())
    found = CostKeeping(facts, [shelf], lambda: NOW).open(PartProbe()).cost
    assert found.guessed == (32,)
    assert found.forward_ms(8) == 6.0 and found.forward_ms(32) == pytest.approx(6.0 * 28 / 11)
    for other in ({"device": "another CPU"}, {"cores": "4"}, {"model": "another"}):
        assert CostKeeping({**facts, **other}, [shelf], lambda: NOW).open(PartProbe()).cost == PART


def test_guesses_are_kept_as_such_and_give_way_to_what_is_measured_later() -> None:
    shelf = Shelf()
    first = keeping(shelf)
    assert first.open(PartProbe()).cost == PART
    assert keeping(shelf).open(PartProbe(speed=0.5)).cost == PART, "the guess is not held against the table"
    assert not first.refine({})
    first.improve(TABLE)
    assert first.refine({1: 1.2}) and not first.refine({1: 1.2})
    found = read_record(shelf.texts[key_of(FACTS)], FACTS, NOW)
    assert found.cost == TABLE and found.factors == {1: 1.2}


@pytest.mark.parametrize(("busy", "kept"), [(False, True), (True, False)])
def test_a_start_without_time_is_made_up_for_and_one_in_a_busy_moment_is_not(busy: bool, kept: bool) -> None:
    shelf = Shelf()
    kept_costs = keeping(shelf)
    kept_costs.open(PartProbe(busy=busy, in_time=False))
    assert not shelf.texts
    kept_costs.improve(TABLE)
    assert kept_costs.refine({}) == bool(shelf.texts) == kept


# In an engine.


def test_an_engine_starts_warm_and_hands_on_what_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from backends.engine import loading
    from backends.models.tiny import TINY_MODEL_NAME

    caplog.set_level(logging.INFO)
    probes = [ScriptedProbe() for _ in range(3)]
    scripted: Callable[..., ScriptedProbe] = iter(probes).__next__
    monkeypatch.setattr(loading, "CostProbe", lambda runner, heads, most_rows: scripted())
    options, store = loading.EngineOptions(model=TINY_MODEL_NAME, threads=1, max_running=2), FolderStore(tmp_path)
    parts = [loading.load_parts(options) for _ in range(3)]
    cold = loading.build_core(parts[0], options, cost_stores=[store])
    for step in range(250):
        cold.core.accounting.calibration.observe(
            1, drafting=step % 2 == 0, predicted_ms=1.0, measured_ms=1.0 + 0.3 * (step % 2 == 0)
        )
    engine = loading.Engine(cold.core, cold.info, keeping=cold.keeping)
    assert engine.keep_cost() and not engine.keep_cost()
    engine.close()

    warm = loading.build_core(parts[1], options, cost_stores=[store])
    assert (probes[1].measured, probes[1].checked) == (0, 1)
    assert warm.core.cost == TABLE
    assert warm.core.accounting.calibration.factor(1) == pytest.approx(1.3)
    assert "taken over" in caplog.text

    other = replace(options, max_model_len=64)
    loading.build_core(parts[2], other, cost_stores=[store])
    assert probes[2].measured == 1, "over a shorter context steps take another time"
    assert len(list(tmp_path.iterdir())) == 3, "two of them, and the last as a guess for what comes near"


def test_the_facts_tell_engines_apart() -> None:
    from backends.cost.fingerprint import facts_of
    from backends.engine import loading
    from backends.models.tiny import TINY_MODEL_NAME
    from backends.runners.hf import HfRunner

    def facts(**changes: Any) -> dict[str, str]:
        options = loading.EngineOptions(**{"model": TINY_MODEL_NAME, "dtype": "float32", **changes})
        parts = loading.load_parts(options)
        runner = HfRunner(parts.model, num_pages=16, max_rows=64, max_context=64)
        return facts_of(runner, parts.model.config, parts.heads, options.quantize)

    plain = facts()
    assert plain == facts()
    assert {"device", "cores", "dtype", "runner", "software", "model", "heads", "threads"} <= plain.keys()
    assert all(plain.values()) or not plain["quantize"]
    assert {name for name, value in facts(dtype="bfloat16").items() if value != plain[name]} == {"dtype"}
    assert {name for name, value in facts(model=f"{TINY_MODEL_NAME}:gpt-neox").items() if value != plain[name]} == {
        "model"
    }
