"""ARCHITECTURE.md is true: it names every package, every file that it names is there, and its loop is the code's."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = ("gateway", "telemetry", "policy", "backends")


def test_every_package_is_on_the_map() -> None:
    packages = {f"{init.parent.relative_to(ROOT)}/" for top in PACKAGES for init in (ROOT / top).rglob("__init__.py")}
    assert {each for each in packages if f"`{each}`" not in TEXT} == set()


def test_every_file_that_is_named_is_there() -> None:
    files = [path.as_posix() for top in (*PACKAGES, "tests") for path in (ROOT / top).rglob("*.*")]
    named = set(re.findall(r"`([\w/]+\.(?:py|c|h))`", TEXT))
    assert len(named) > 50
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_the_loop_is_quoted_from_the_code() -> None:
    source = (ROOT / "backends" / "engine" / "core.py").read_text()
    (core,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineCore"]
    (step,) = [node for node in core.body if isinstance(node, ast.FunctionDef) and node.name == "step"]
    lines = source.splitlines()[step.lineno - 1 : step.end_lineno]
    assert "\n".join(line[4:] for line in lines) in TEXT
