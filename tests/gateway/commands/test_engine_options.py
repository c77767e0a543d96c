"""An engine's options are said once: flags, fields of the backends file and the table in the docs agree with that."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from backends.engine.options import ABOUT, DEFAULTS, About, EngineOptions
from gateway import cli
from gateway.commands.engine_options import add_engine_options, given_options
from gateway.routing.backends_file import parse_backends
from gateway.routing.spec import EngineSpec
from tests.support.paths import ROOT


def a_value(about: About) -> Any:
    if about.switch:
        return True
    if about.limits is not None:
        return about.limits[1]
    return about.choices[-1] if about.choices else "org/name"


@pytest.mark.parametrize("name", ABOUT)
def test_flag_and_field_set_the_same_option(name: str, tmp_path: Any) -> None:
    about, value = ABOUT[name], a_value(ABOUT[name])
    wanted = EngineOptions(**{name: value})
    if about.flag:
        parser = argparse.ArgumentParser()
        add_engine_options(parser.add_argument, about.flag)
        assert given_options(parser.parse_args([])) == EngineOptions()
        assert given_options(parser.parse_args([about.flag] if about.switch else [about.flag, str(value)])) == wanted
    file = f"version: 1\nbackends: [{{name: a, kind: engine, {name}: {value}}}]".encode()
    if about.in_file:
        (engine,) = parse_backends(file, str(tmp_path / "b.yaml")).backends
        assert isinstance(engine, EngineSpec) and engine.options == wanted
    else:
        with pytest.raises(Exception, match=name):
            parse_backends(file, str(tmp_path / "b.yaml"))


@pytest.mark.parametrize("name", [name for name, about in ABOUT.items() if about.limits])
def test_flags_and_fields_have_the_same_limits(name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    about = ABOUT[name]
    assert about.limits is not None
    for value in (about.limits[0] - 1, about.limits[1] + 1):
        with pytest.raises(Exception, match=rf"{name}: expected a whole number"):
            parse_backends(f"version: 1\nbackends: [{{name: a, kind: engine, {name}: {value}}}]".encode(), "b.yaml")
        if about.flag:
            assert cli.main(["serve", about.flag, str(value)]) == 2
            assert f"argument {about.flag}: {value} is not between" in capsys.readouterr().err


def table() -> str:
    """The options as docs/backends.md shows them."""
    rows = ["| field of the file | flag of `serve` | values | default | |", "| --- | --- | --- | --- | --- |"]
    for name, about in ABOUT.items():
        values = ", ".join(f"`{each}`" for each in about.choices)
        if about.indexed:
            values += f"; in the file also `{about.indexed}:N`"
        if about.limits is not None:
            values = f"{about.limits[0]} to {about.limits[1]}"
        text, _, default = about.help.partition("default: ")
        if "%" in default:
            default = f"`{DEFAULTS[name]}`"
        flag = f"`{about.flag}`" if about.flag else ""
        field = f"`{name}`" if about.in_file else ""
        if about.flag == "--runner":
            flag = "`--runner` (of `bench` and `verify-lossless`)"
        rows.append(re.sub(" +", " ", f"| {field} | {flag} | {values} | {default} | {text.rstrip('; ')} |"))
    return "\n".join(rows)


def test_the_docs_have_every_option() -> None:
    assert table() in (ROOT / "docs" / "backends.md").read_text(), f"in docs/backends.md goes:\n{table()}"
