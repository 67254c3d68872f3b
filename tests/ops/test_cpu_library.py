"""The C kernels are built with what the host has, and a host without a compiler is told so."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from kernels import cpu_library
from kernels.cpu_library import BuildFailed


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A copy of the source in an empty folder, nothing built, nothing cached."""
    source = tmp_path / "cpu.c"
    shutil.copy(cpu_library.SOURCE, source)
    monkeypatch.setattr(cpu_library, "SOURCE", source)
    monkeypatch.setattr(cpu_library.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    cpu_library.library.cache_clear()
    yield source
    cpu_library.library.cache_clear()


def test_without_a_compiler_the_reason_is_a_sentence(fresh, monkeypatch):
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)
    assert "need a C compiler" in cpu_library.why_not()
    with pytest.raises(BuildFailed):
        cpu_library.library()


@pytest.mark.skipif(not any(map(shutil.which, cpu_library.COMPILERS)), reason="needs a C compiler")
def test_a_source_that_does_not_compile_says_what_the_compiler_said(fresh):
    fresh.write_text("this is not C")
    assert "cannot build the CPU kernels" in cpu_library.why_not()
    assert not list((fresh.parent / "build").glob("*.so"))


@pytest.mark.skipif(not any(map(shutil.which, cpu_library.COMPILERS)), reason="needs a C compiler")
def test_a_change_of_source_is_another_library(fresh):
    before = cpu_library._fingerprint()
    fresh.write_text(fresh.read_text() + "\n/* changed */\n")
    assert cpu_library._fingerprint() != before


def test_only_cpus_are_served():
    assert cpu_library.why_not(SimpleNamespace(type="cuda")) == "runs on CPUs only"
