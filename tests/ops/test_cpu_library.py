"""The C kernels are built with what the host has, and a host without a compiler is told so."""

from __future__ import annotations

import re
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from kernels.toolchain import cpu_library
from kernels.toolchain.cpu_library import BuildFailed


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


needs_library = pytest.mark.skipif(cpu_library.why_not() is not None, reason="needs the C kernels")


@needs_library
def test_calls_are_noted_by_their_own_thread_only_and_made_when_replayed():
    x, y, other = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.zeros(2, 3)
    to, source = torch.zeros(2, 2, 5)[..., 1:], torch.arange(16.0).view(2, 2, 4)
    with cpu_library.recording() as calls:
        cpu_library.add_rows(x, y)
        cpu_library.copy_heads(to, source)
        worker = threading.Thread(target=cpu_library.add_rows, args=(other, y))
        worker.start()
        worker.join()
    assert [call.name for call in calls] == ["hr_add_rows", "hr_copy_heads"]
    assert x.eq(1).all() and to.eq(0).all() and other.eq(2).all()
    replay = cpu_library.Replay(calls)
    replay()
    replay()
    assert x.eq(5).all() and to.equal(source)
    cpu_library.add_rows(x, y)
    assert x.eq(7).all(), "a call outside of a recording is made at once"


@needs_library
def test_the_numbers_of_recorded_functions_are_those_of_the_c_source():
    source = cpu_library.SOURCE.read_text()
    cases = re.findall(r"case (\d+):[^:]*?(hr_\w+)\(", source[source.index("int hr_replay") :])
    assert [(int(number), name) for number, name in cases] == list(enumerate(cpu_library.RECORDED))
    assert int(re.search(r"#define CALL_WORDS (\d+)", source)[1]) == cpu_library.CALL_WORDS
    assert max(len(cpu_library._SIGNATURES[name]) for name in cpu_library.RECORDED) < cpu_library.CALL_WORDS
