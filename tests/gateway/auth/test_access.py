"""Who may ask: keys, scopes, revocation, limits by key, ports, web pages. Over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import cli
from gateway.auth.access import Access, can_be_rebound
from gateway.auth.errors import NotAllowed
from gateway.auth.keyfile import KeyFileError, json_schema, parse_keys
from gateway.settings import GatewaySettings
from tests.support.access_helpers import CHAT, bearer, chat, entry, keyed_gateway, new_key, write_keys
from tests.support.fakes import FakeDecoder
from tests.support.live_gateway import LiveGateway, running_gateway
from tests.support.ports import free_port
from tests.support.valkey import ValkeyProcess

PATIENCE_S = 30.0
ALICE, GUEST, ROOT, OLD, OFF, TIGHT, SMALL, ONE = (new_key() for _ in range(8))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(
        path,
        entry("alice", ALICE),
        entry("guest", GUEST),
        entry("root", ROOT, scopes=["admin"]),
        entry("old", OLD, expires="2020-01-01"),
        entry("off", OFF, disabled=True),
        entry("tight", TIGHT, limits={"requests_per_minute": 2}),
        entry("small", SMALL, limits={"tokens_per_minute": 200}),
        entry("one", ONE, limits={"concurrent_streams": 1}),
    )
    settings = GatewaySettings(cors_origins=("https://chat.example.com",))
    with keyed_gateway(path, settings=settings) as live:
        yield live


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "There is no API key"),
        ({"authorization": ""}, "can't be read"),
        ({"authorization": "Bearer"}, "can't be read"),
        ({"authorization": f"Basic {ALICE}"}, "can't be read"),
        (bearer(ALICE[:-1]), "not known"),
        (bearer(ALICE + "x"), "not known"),
        (bearer(ALICE.upper()), "not known"),
        (bearer("é" * 40), "not known"),
        (bearer(OLD), "'old' has expired"),
        (bearer(OFF), "'off' is disabled"),
    ],
)
def test_no_good_key_no_answer(gateway: LiveGateway, headers: dict[str, str], says: str) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for response in (
        gateway.http.post(CHAT, json=chat(), headers=raw),
        gateway.http.get("/v1/models", headers=raw),
        gateway.http.get("/admin/stats", headers=raw),
        gateway.http.get("/schema/openapi.json", headers=raw),
    ):
        assert response.status_code == 401
        error = error_of(response)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert says in error["message"]
        assert response.headers["www-authenticate"] == "Bearer"
        assert "mgw-" not in response.text


def test_two_authorization_headers_are_none(gateway: LiveGateway) -> None:
    both = [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ROOT}")]
    assert gateway.http.get("/v1/models", headers=both).status_code == 401


def test_the_official_client(gateway: LiveGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=ALICE, max_retries=0) as client:
        assert client.chat.completions.create(**chat()).choices[0].message.content
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


def test_scopes(gateway: LiveGateway) -> None:
    http = gateway.http
    assert http.get("/admin/policy", headers=bearer(ROOT)).status_code == 200
    for response, scope in (
        (http.post(CHAT, json=chat(), headers=bearer(ROOT)), "inference"),
        (http.post("/v1/decoding/explain", json=chat(), headers=bearer(ROOT)), "inference"),
        (http.get("/admin/policy", headers=bearer(ALICE)), "admin"),
        (http.post("/admin/policy/validate", json={"policy": ""}, headers=bearer(ALICE)), "admin"),
        (http.get("/admin/decisions/x", headers=bearer(ALICE)), "admin"),
    ):
        assert response.status_code == 403
        assert error_of(response)["code"] == "insufficient_scope"
        assert f"no scope '{scope}'" in error_of(response)["message"]


def test_every_route_but_health_and_the_page_needs_a_key(gateway: LiveGateway) -> None:
    """Asks the app itself, so a route that is added later and forgets about access is found too."""
    routes = [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in gateway.server.config.app.routes  # type: ignore[union-attr]
        for method in sorted(route.methods)
    ]
    assert len(routes) > 10
    open_routes = {path for method, path in routes if gateway.http.request(method, path).status_code != 401}
    # The page's files hold no data: what they show they ask for with a key.
    assert open_routes == {"/health", "/healthz", "/readyz", "/startupz", "/ui", "/ui/x"}


def test_every_route_is_in_the_document_with_what_it_needs(gateway: LiveGateway) -> None:
    document = gateway.http.get("/schema/openapi.json", headers=bearer(ALICE)).json()
    assert document["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"
    described = {
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path)): operation["security"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    served = {
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in gateway.server.config.app.routes  # type: ignore[union-attr]
        for method in route.methods - {"OPTIONS"}
    }
    assert served - {("GET", "/schema/openapi.json"), ("GET", "/openapi.json")} == set(described)
    for (method, path), security in described.items():
        for key, scope in ((ALICE, "inference"), (ROOT, "admin")):
            refused = gateway.http.request(method, path, headers=bearer(key)).status_code in (401, 403)
            allowed = not security or scope in security[0]["apiKey"] or security[0]["apiKey"] == []
            assert refused != allowed, (method, path, scope)


def test_the_key_is_the_tenant(gateway: LiveGateway) -> None:
    response = gateway.http.post(CHAT, json=chat(), headers=bearer(GUEST))
    assert response.json()["decoding"]["rule"] == "guests"
    record = gateway.http.get(f"/admin/decisions/{response.json()['id']}", headers=bearer(ROOT)).json()
    assert record["facts"]["tenant"] == "guest"
    assert gateway.http.post(CHAT, json=chat(), headers=bearer(ALICE)).json()["decoding"]["rule"] == "default"


def test_requests_per_minute(gateway: LiveGateway) -> None:
    answers = [gateway.http.post(CHAT, json=chat(), headers=bearer(TIGHT)) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    refused = answers[2]
    assert (error_of(refused)["code"], error_of(refused)["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "'tight' is at its limit of 2 requests per minute" in error_of(refused)["message"]
    assert 25 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert gateway.http.get("/v1/models", headers=bearer(TIGHT)).status_code == 200, "only completions count"


def test_a_key_out_of_requests_is_refused_before_anything_is_tokenised(
    gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    while gateway.http.post(CHAT, json=chat(), headers=bearer(TIGHT)).status_code == 200:
        pass
    monkeypatch.setattr(gateway.tokenizer, "encode_chat", None)  # would fail if it were called
    again = gateway.http.post(CHAT, json=chat(), headers=bearer(TIGHT))
    assert (again.status_code, error_of(again)["code"]) == (429, "rate_limit_exceeded")
    assert "limit of 2 requests per minute" in error_of(again)["message"]
    assert 1 <= int(again.headers["retry-after"]) <= 30
    assert again.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_budget_that_is_spent_is_named_with_its_renewal(tmp_path: Path) -> None:
    key = new_key()
    path = tmp_path / "keys.yaml"
    write_keys(path, entry("daily", key, limits={"tokens_per_day": 100, "tokens_per_month": 1_000_000}))
    with keyed_gateway(path) as live:
        first = live.http.post(CHAT, json=chat(max_tokens=40), headers=bearer(key))
        used = first.json()["usage"]["total_tokens"]
        assert first.headers["x-ratelimit-limit-tokens-per-day"] == "100"
        refused = live.http.post(CHAT, json=chat(max_tokens=99 - used), headers=bearer(key))
        never = live.http.post(CHAT, json=chat(max_tokens=200), headers=bearer(key))
    assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota")
    assert f"has used {used} of its budget of 100 tokens per day" in error_of(refused)["message"]
    assert re.search(r"The budget renews at \d{4}-\d\d-\d\dT00:00:00Z\.$", error_of(refused)["message"])
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    assert refused.headers["x-should-retry"] == "false", "clients that try again by themselves would do so in vain"
    assert int(refused.headers["x-ratelimit-remaining-tokens-per-day"]) == 100 - used
    assert "its API key has 100 a day" in error_of(never)["message"]


def test_tokens_are_reserved_and_settled(gateway: LiveGateway) -> None:
    def ask(**more: Any) -> httpx.Response:
        return gateway.http.post(CHAT, json=chat("x" * 10, **more), headers=bearer(SMALL))

    first = ask(max_tokens=150)
    used = first.json()["usage"]["total_tokens"]
    assert used < 60
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 200 - 150, "while it runs, all that it may use is taken"
    second = ask(max_tokens=100)
    assert second.status_code == 200, "what was not used came back"
    never = ask(max_tokens=400)
    assert (never.status_code, error_of(never)["code"]) == (400, "over_token_limit")
    assert error_of(never)["param"] == "max_tokens"
    third = ask(max_tokens=150)
    assert third.status_code == 429
    assert "This request may need" in error_of(third)["message"]


def test_concurrent_streams(gateway: LiveGateway) -> None:
    gateway.decoder.hold(at_step=2)
    try:
        with gateway.http.stream("POST", CHAT, json=chat(stream=True), headers=bearer(ONE)) as stream:
            pieces = stream.iter_bytes()  # kept: httpx closes the connection with its iterator
            next(pieces)
            refused = gateway.http.post(CHAT, json=chat(), headers=bearer(ONE))
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "limit of 1 concurrent streams" in error_of(refused)["message"]
        gateway.wait_idle()
    finally:
        gateway.decoder.release()
    assert gateway.http.post(CHAT, json=chat(), headers=bearer(ONE)).status_code == 200


def test_a_refused_request_costs_nothing(gateway: LiveGateway) -> None:
    """Refused for another reason after it had paid: the key gets it all back."""
    limiter = gateway.state.access.limiter
    before = limiter.as_dict()["open_leases"]
    gateway.decoder.die()
    try:
        assert gateway.http.post(CHAT, json=chat(max_tokens=5), headers=bearer(ONE)).status_code == 503
    finally:
        gateway.decoder.revive()
    assert limiter.as_dict()["open_leases"] == before
    assert gateway.http.post(CHAT, json=chat(max_tokens=5), headers=bearer(ONE)).status_code == 200


def test_security_headers_on_every_kind_of_response(gateway: LiveGateway) -> None:
    http = gateway.http
    good = http.post(CHAT, json=chat(), headers=bearer(ALICE))
    stream = http.post(CHAT, json=chat(stream=True), headers=bearer(ALICE))
    for response in (good, stream, http.get("/healthz"), http.get("/nowhere"), http.get(CHAT), http.get("/v1/models")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["cache-control"] in ("no-store", "no-cache")
        assert "server" not in response.headers


def test_cors_is_for_listed_origins_only(gateway: LiveGateway) -> None:
    def preflight(origin: str) -> httpx.Response:
        asks = {"origin": origin, "access-control-request-method": "POST"}
        asks["access-control-request-headers"] = "authorization, content-type"
        return gateway.http.options(CHAT, headers=asks)

    allowed = preflight("https://chat.example.com")
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "access-control-allow-credentials" not in allowed.headers
    for evil in ("https://chat.example.com.evil.com", "https://evil.com", "http://chat.example.com", "null"):
        refused, answered = preflight(evil), gateway.http.get("/healthz", headers={"origin": evil})
        assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed")
        assert evil in error_of(refused)["message"]
        for each in (refused, answered):
            assert not [name for name in each.headers if name.startswith("access-control-")]
            assert each.headers["vary"] == "origin", "nobody may keep it for another origin"
            assert each.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "asked",
    [
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
        "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout",
        "openai-organization,openai-project,traceparent,tracestate,baggage",
        "X-Any-Header-At-All",
        "",
    ],
)
def test_pages_of_an_allowed_origin_may_send_any_header(gateway: LiveGateway, asked: str) -> None:
    """Without a key: browsers send none with a preflight."""
    origin = "https://chat.example.com"
    asks = {"origin": origin, "access-control-request-method": "POST"}
    answer = gateway.http.options(CHAT, headers=asks | ({"access-control-request-headers": asked} if asked else {}))
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers.get("access-control-allow-headers", "") == asked
    assert "POST" in answer.headers["access-control-allow-methods"]
    # What the page may then read, of errors too.
    refused = gateway.http.post(CHAT, json=chat(), headers={"origin": origin})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == origin
    assert {"x-request-id", "retry-after"} < set(refused.headers["access-control-expose-headers"].split(", "))


def test_without_the_option_there_is_no_cors_and_no_dns_rebinding() -> None:
    with running_gateway() as live:
        headers = {"origin": "https://evil.com", "access-control-request-method": "POST"}
        assert not [name for name in live.http.options(CHAT, headers=headers).headers if name.startswith("access-")]
        for host in ("127.0.0.1:8080", "host.docker.internal:18101", "[::1]:80", "app.localhost:1"):
            assert live.http.get("/v1/models", headers={"host": host}).status_code == 200
        rebound = live.http.get("/v1/models", headers={"host": "evil.com:8080"})
        assert (rebound.status_code, error_of(rebound)["code"]) == (403, "host_not_allowed")
        for each in ("'evil.com'", "--allowed-host evil.com", "--api-keys"):
            assert each in error_of(rebound)["message"]


@pytest.mark.parametrize(
    ("host", "strange"),
    [
        *((host, False) for host in ("localhost", "llm", "LOCALHOST.", "box.localhost", "127.0.0.1", "::1", "[::1]")),
        *(
            (host, False)
            for host in ("192.168.1.5", "host.docker.internal", "a.b.internal", "gateway.local", "app.test")
        ),
        *((host, False) for host in ("box.home.arpa", "Gateway.Internal.")),
        *((host, True) for host in ("evil.com", "evil.com.", "127.0.0.1.nip.io", "localhost.evil.com", "1.2.3")),
        *((host, True) for host in ("internal.evil.com", "evilinternal.com", "x.local.com", "box.lan", "::1.evil.com")),
    ],
)
def test_which_names_a_stranger_may_have(host: str, strange: bool) -> None:
    assert can_be_rebound(host) is strange


def test_further_names_can_be_allowed() -> None:
    access = Access(local=True, allowed_hosts=["Box.lan", "llm.example.com"])
    for host in (b"box.lan", b"BOX.LAN:8080", b"llm.example.com", b"box.lan."):
        access.check("inference", [(b"host", host)], 80)
    for host in (b"other.lan", b"a.box.lan", b"box.lan.evil.com"):
        with pytest.raises(NotAllowed):
            access.check("inference", [(b"host", host)], 80)


def test_on_other_networks_any_host_will_do() -> None:
    Access(local=False).check("inference", [(b"host", b"gateway.example.com")], 80)
    with pytest.raises(NotAllowed):
        Access(local=True).check("inference", [(b"host", b"gateway.example.com")], 80)


def test_revocation_is_live_within_seconds_and_a_broken_edit_changes_nothing(tmp_path: Path) -> None:
    """As Kubernetes updates a Secret: the file is a link through ``..data``, which is swapped."""
    alice, bob, root = new_key(), new_key(), new_key()
    admin = entry("root", root, scopes=["admin"])
    for name, entries in (("1", [entry("alice", alice), admin]), ("2", [entry("bob", bob), admin])):
        (tmp_path / f"..{name}").mkdir()
        write_keys(tmp_path / f"..{name}" / "keys", *entries)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")

    def wait_for(condition: Any) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + PATIENCE_S
            time.sleep(0.05)
        return time.monotonic() - began

    with keyed_gateway(tmp_path / "keys") as live:

        def status(key: str) -> int:
            return live.http.get("/v1/models", headers=bearer(key)).status_code

        assert (status(alice), status(bob)) == (200, 401)
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        wait_for(lambda: status(alice) == 401)
        assert status(bob) == 200
        (tmp_path / "..2" / "keys").write_text("version: 1\nkeys: [{name: bob}]\n")
        wait_for(lambda: live.http.get("/healthz").json()["status"] == "degraded")
        health = live.http.get("/readyz")
        assert health.status_code == 200
        assert health.json()["degraded"] == ["the key file's last edit was refused; the keys before it are in force"]
        assert status(bob) == 200
        shown = live.http.get("/admin/stats", headers=bearer(root)).json()["access"]["keys"]
        assert "keys[0].hash: is missing" in shown["last_rejection"][0]


def test_an_admin_port_has_the_admin_routes_and_nothing_else_has(tmp_path: Path) -> None:
    from gateway.http.server import bind

    alice, root = new_key(), new_key()
    write_keys(tmp_path / "keys", entry("alice", alice), entry("root", root, scopes=["admin"]))
    with ExitStack() as stack:
        admin = stack.enter_context(bind("127.0.0.1", 0))
        port = admin.getsockname()[1]
        live = stack.enter_context(keyed_gateway(tmp_path / "keys", admin_port=port, more_sockets=[admin]))
        there = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        assert there.get("/admin/policy", headers=bearer(root)).status_code == 200
        assert there.get("/admin/policy").status_code == 401
        assert live.http.get("/admin/policy", headers=bearer(root)).status_code == 404
        assert there.post(CHAT, json=chat(), headers=bearer(alice)).status_code == 404
        assert live.http.post(CHAT, json=chat(), headers=bearer(alice)).status_code == 200
        assert [each.get("/healthz").status_code for each in (there, live.http)] == [200, 200]


# The race: real HTTP, a real server, two gateways.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey")).start()
    yield server
    server.kill()


async def test_200_requests_race_for_one_budget(tmp_path: Path, server: ValkeyProcess) -> None:
    """Every request may use 20 tokens and uses all of them; the budget holds 100 such requests."""
    key, budget, cost = new_key(), 2000, 20
    write_keys(tmp_path / "keys", entry("racer", key, limits={"tokens_per_minute": budget}))
    settings = GatewaySettings(max_concurrent=200, max_queue=200)
    body = chat("x" * 8, max_tokens=10, ignore_eos=True)
    with ExitStack() as stack:
        pair = [
            stack.enter_context(
                keyed_gateway(tmp_path / "keys", server.url, settings=settings, decoder=FakeDecoder(max_running=200))
            )
            for _ in range(2)
        ]
        client = httpx.AsyncClient(limits=httpx.Limits(max_connections=200), timeout=60)

        async def ask(number: int) -> httpx.Response:
            return await client.post(f"{pair[number % 2].url}{CHAT}", json=body, headers=bearer(key))

        began = time.monotonic()
        answers = await asyncio.gather(*(ask(number) for number in range(200)))
        refill = budget / 60 * (time.monotonic() - began)
        await client.aclose()
        statuses = Counter(each.status_code for each in answers)
        assert set(statuses) <= {200, 429}
        used = sum(each.json()["usage"]["total_tokens"] for each in answers if each.status_code == 200)
        assert used == cost * statuses[200]
        assert used <= budget + refill, "not a token over budget and refill"
        assert used > budget - cost, "and none was refused while there was budget left"
        for each in answers:
            if each.status_code == 429:
                assert int(each.headers["x-ratelimit-remaining-tokens"]) < cost


async def test_what_200_requests_do_not_use_is_there_again(tmp_path: Path, server: ValkeyProcess) -> None:
    """Every request reserves 210 tokens and uses 51; in the end only those are gone."""
    key, budget = new_key(), 50_000
    write_keys(tmp_path / "keys", entry("frugal", key, limits={"tokens_per_minute": budget}))
    with keyed_gateway(
        tmp_path / "keys",
        server.url,
        settings=GatewaySettings(max_concurrent=300),
        decoder=FakeDecoder(max_running=200),
    ) as live:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=100), timeout=60) as client:
            work = (
                client.post(f"{live.url}{CHAT}", json=chat("x" * 8, max_tokens=200), headers=bearer(key))
                for _ in range(200)
            )
            answers = await asyncio.gather(*work)
            assert {each.status_code for each in answers} == {200}, "together they never ask for more than there is"
            used = sum(each.json()["usage"]["total_tokens"] for each in answers)
            last = await client.post(f"{live.url}{CHAT}", json=chat("x" * 8, max_tokens=1), headers=bearer(key))
        assert int(last.headers["x-ratelimit-remaining-tokens"]) >= budget - used - 11


EXPLAIN = "/v1/decoding/explain"


@pytest.mark.parametrize("where", ["memory", "redis"])
def test_explaining_counts_as_a_request_and_takes_no_tokens(tmp_path: Path, server: ValkeyProcess, where: str) -> None:
    key = new_key()
    limits = {"requests_per_minute": 4, "tokens_per_minute": 1000}
    write_keys(tmp_path / "keys", entry(f"asking-{where}", key, limits=limits))
    with keyed_gateway(tmp_path / "keys", "memory" if where == "memory" else server.url) as live:

        def explain(**more: Any) -> Any:
            return live.http.post(EXPLAIN, json=chat("hello", **more), headers=bearer(key))

        first = explain()
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "3"
        assert explain(max_tokens=10**6).status_code == 400, "found out by tokenising, which is paid for"
        assert explain(model="nobody").status_code == 404, "found out for nothing"
        assert live.http.post(CHAT, json=chat(max_tokens=1), headers=bearer(key)).status_code == 200
        last = explain()
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(last.headers["x-ratelimit-remaining-tokens"]) > 980
        counted = len(live.tokenizer.threads)
        refused = explain()
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        explain()
        assert len(live.tokenizer.threads) <= counted + 1, "one who is known to be out of requests costs no tokenising"


def test_few_are_explained_at_a_time_beside_the_answers() -> None:
    with running_gateway() as live:

        async def take() -> Any:
            return live.state.explaining.admit(live.state.explaining.places.capacity)

        ticket = live.in_loop(take())
        refused = live.http.post(EXPLAIN, json=chat())
        assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        assert live.http.post(CHAT, json=chat()).status_code == 200

        async def give_back() -> None:
            ticket.close()

        live.in_loop(give_back())
        assert live.http.post(EXPLAIN, json=chat()).status_code == 200
        assert live.state.explaining.in_flight == 0


# Files and commands.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("version: 2\nkeys: []", "reads version 1"),
        ("keys: []", "version: is missing"),
        ("version: 1", "keys: is missing"),
        ("version: 1\nkeys: [{name: a}]", "keys[0].hash: is missing"),
        ("version: 1\nkeys: [{name: 'a b', hash: x}]", "expected a name of letters"),
        ("version: 1\nkeys: [{name: a, hash: mgw-verysecretkey}]", "never put a key itself here"),
        ("version: 1\nkeys: [{name: a, hash: H, scopes: root}]", "use one of: admin, inference"),
        ("version: 1\nkeys: [{name: a, hash: H, expires: tomorrow}]", "expected a date"),
        ("version: 1\nkeys: [{name: a, hash: H, expires: '2027-01-01T00:00:00'}]", "expected a date"),
        ("version: 1\nkeys: [{name: a, hash: H, limits: {tokens_per_minute: 0}}]", "from 1 to"),
        ("version: 1\nkeys: [{name: a, hash: H, limits: {tokens: 1}}]", "did you mean 'tokens_per_day'"),
        ("version: 1\nkeys: [{name: a, hash: H}, {name: b, hash: H}]", "is that of keys[0] too"),
        ("version: 1\nkeys: [{name: a, hash: H}, {name: a, hash: G}]", "keys[1].name: is that of keys[0] too"),
        ("version: 1\nkeys: &a [*a]", "keys"),
        ("version: 1\nkeys: [{name: a, hash: H, limits: {requests_per_minute: 0600}}]", "write it in decimal"),
        ("version: 1\nkeys: [{name: a, hash: H, limits: {tokens_per_minute: 1_000}}]", "write it in decimal"),
        ("version: 1\nkeys: [{name: a, hash: H, limits: {concurrent_streams: 1:30}}]", "write it in decimal"),
        ("version: 01\nkeys: []", "write it in decimal"),
    ],
)
def test_key_files_are_strict(text: str, says: str) -> None:
    text = text.replace(" H", f" 'sha256:{'a' * 64}'").replace(" G", f" 'sha256:{'b' * 64}'")
    with pytest.raises(KeyFileError) as caught:
        parse_keys(text.encode(), "keys.yaml")
    assert says in str(caught.value)
    assert "verysecret" not in str(caught.value)


def test_a_key_may_have_two_digests_while_it_is_rotated() -> None:
    first, second = new_key(), new_key()
    one, two = (entry("a", key)["hash"] for key in (first, second))
    keys = parse_keys(
        f"version: 1\nkeys:\n  - {{name: a, hash: ['{one}', '{two}'], expires: 2027-01-31}}".encode(), "f"
    )
    for each in (first, second):
        found = keys.find(each)
        assert found is not None
        assert (found.name, found.expired(1801353600 - 1), found.expired(1801353600)) == ("a", False, True)
    assert keys.find(one) is None, "a digest is no key"


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    path = tmp_path / "keys.yaml"
    assert cli.main(["keys", "new", "alice", "--scope", "admin", "--scope", "inference", "--expires", "2999-01-01",
                     "--tokens-per-minute", "5000", "--concurrent-streams", "2"]) == 0  # fmt: skip
    made = capsys.readouterr()
    assert "mgw-" not in made.out
    key = made.err.split()[-1]
    assert cli.main(["keys", "new", "bob", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    path.write_text(f"version: 1\nkeys:\n{made.out}  - {json.dumps(other['entry'])}\n")
    assert cli.main(["keys", "validate", str(path)]) == 0
    assert "2 keys" in capsys.readouterr().out
    assert cli.main(["keys", "list", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "alice: in force, admin and inference, 5000 tokens per minute, 2 concurrent streams, "
        "expires 2999-01-01T00:00:00+00:00",
        "bob: in force, inference, no limits",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{key}\n"))
    assert cli.main(["keys", "hash"]) == 0
    assert capsys.readouterr().out.strip() in path.read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hunter2\n"))
    assert cli.main(["keys", "hash"]) == 2
    assert cli.main(["keys", "new", "a b"]) == 2
    path.write_text("version: 1\n")
    assert cli.main(["keys", "validate", str(path)]) == 1
    assert cli.main(["keys", "schema"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told[told.index("{") :]) == json_schema()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines, and there are no API keys"),
        (["--admin-port", "9999", "--admin-host", "::"], "--admin-host :: can be reached"),
        (["--api-keys", "nowhere"], "--api-keys nowhere: No such file"),
        (["--cors-origin", "*"], "is not an origin"),
        (["--allowed-host", "http://box.lan"], "is not a host name"),
        (["--allowed-host", "box.lan:8080"], "is not a host name"),
        (["--keep-alive", "nan"], "is not a number of seconds"),
        (["--keep-alive", "0"], "is not a number of seconds"),
        (["--cors-origin", "https://*.example.com"], "name every origin"),
        (["--cors-origin", "https://example.com/"], "is not an origin"),
    ],
)
def test_serve_refuses_what_is_unsafe(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", str(free_port()), "--redis-url", "memory", *argv]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
