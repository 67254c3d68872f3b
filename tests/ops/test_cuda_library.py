"""CUDA sources are built with the nvcc that is there, and a host without one, or with a bad one, is told so."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from kernels.linear import fp8_hopper, nvfp4_hopper
from kernels.toolchain import cuda_library
from kernels.toolchain.cuda_library import BuildFailed, Library

SOURCE = '#include <stdint.h>\n#include "one.cuh"\nint answer(int x) { return x + ONE; }\n'


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A source with a header of ours, nothing built; stored in this test's folder only."""
    monkeypatch.setattr(cuda_library.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(cuda_library, "_needs_hopper", lambda device: None)
    (tmp_path / "one.cuh").write_text("#define ONE 1\n")
    (tmp_path / "some.cu").write_text(SOURCE)
    return Library(tmp_path / "some.cu", "test kernels", {"answer": "i"})


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Makes a script the compiler."""

    def use(script: str) -> str:
        path = tmp_path / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(cuda_library, "find_compiler", lambda: str(path))
        return str(path)

    return use


def test_without_a_compiler_the_reason_is_a_sentence(library, monkeypatch):
    monkeypatch.setattr(cuda_library, "find_compiler", lambda: None)
    assert "test kernels need nvcc" in library.why_not("cuda")


@pytest.mark.parametrize("hanging", ["exec sleep 30", 'test "$1" = --version || exec sleep 30'])
def test_a_compiler_that_hangs_is_given_up_with_a_sentence(library, nvcc, monkeypatch, hanging):
    monkeypatch.setattr(cuda_library, "VERSION_TIMEOUT_S", 0.5)
    monkeypatch.setattr(cuda_library, "BUILD_TIMEOUT_S", 0.5)
    nvcc(hanging)
    assert "did not finish within 0.5 s" in library.why_not("cuda")
    began = time.monotonic()
    assert "did not finish" in library.why_not("cuda")
    assert time.monotonic() - began < 0.4, "every op that asks would wait for it again"


def test_a_compiler_that_cannot_be_run_is_named(library, nvcc):
    path = nvcc("true")
    Path(path).chmod(0o644)
    assert f"{path} cannot be run" in library.why_not("cuda")


def test_a_compiler_that_refuses_is_quoted(library, nvcc):
    nvcc("echo unsupported host compiler >&2; exit 1")
    with pytest.raises(BuildFailed, match="cannot build the test kernels: unsupported host compiler"):
        library.load()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_was_built_is_loaded(library, nvcc):
    nvcc('test "$1" = --version || { for last; do test "$before" = -o && to=$last; before=$last; done\n'
         f'cc -shared -fPIC -x c -I {library.source.parent} {library.source} -o "$to"; }}')  # fmt: skip
    assert library.load().answer(41) == 42


@pytest.mark.parametrize("change", ["source", "header", "compiler"])
def test_a_change_of_anything_that_matters_is_another_library(library, nvcc, change):
    path = nvcc("echo release 13.0")
    before = library.fingerprint(path)
    assert library.fingerprint(path) == before
    if change == "compiler":
        nvcc("echo release 13.1")
    else:
        edited = library.source if change == "source" else library.source.with_name("one.cuh")
        edited.write_text(edited.read_text() + "\n")
    assert library.fingerprint(path) != before


def test_headers_of_our_own_kernels_are_seen():
    names = [path.name for path in cuda_library.sources_of(fp8_hopper.SOURCE)]
    assert names == ["grouped_fp8.cu", "hopper.cuh"]
    assert nvfp4_hopper.library.__self__.source.name == "nvfp4_hopper.cu"
