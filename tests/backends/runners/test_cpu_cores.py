"""What Linux says about its CPU, on both kinds of machine; and what a Mac says."""

from __future__ import annotations

import sys

import pytest

from backends.runners import cpu_cores

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC  7B13\n\nprocessor\t: 1\nmodel name\t: other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\nCPU revision\t: 1\n"


def test_names() -> None:
    assert cpu_cores.named_in(X86) == "AMD EPYC 7B13"
    assert cpu_cores.named_in(ARM) == "ARM 0x41 0xd40"
    assert cpu_cores.named_in("processor : 0\n") is None
    assert cpu_cores.cpu_name()


def test_a_mac_uses_its_quick_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"hw.perflevel0.logicalcpu": (6).to_bytes(4, sys.byteorder), "machdep.cpu.brand_string": b"Apple M3\0"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cpu_cores, "_sysctl", said.get)
    assert cpu_cores.usable_cores() == 6
    assert cpu_cores.cpu_name() == "Apple M3"
    said.clear()
    assert cpu_cores.usable_cores() >= 1
