"""FlashInfer is chosen only where what it would run is prebuilt or can be compiled."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from kernels.attention import mla_prefill, mla_prefill_vendors
from kernels.attention.mla_decode_vendors import MLA_MODULES, needs_flashinfer_mla
from kernels.select import Backend, choose
from kernels.toolchain import vendors
from kernels.toolchain.vendors import needs_flashinfer_modules

HOPPER = torch.device("cuda")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A Hopper host with FlashInfer, no prebuilt module, no CUDA toolkit and no ninja; says where those would be."""

    def module(name: str, **members):
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=object)
    module("flashinfer.jit", __path__=[])
    module("flashinfer.jit.env", FLASHINFER_AOT_DIR=tmp_path / "aot")
    module("flashinfer.jit.cpp_ext", get_cuda_path=lambda: str(tmp_path / "cuda"))
    monkeypatch.setattr(vendors, "_on_hopper", lambda device: None)
    monkeypatch.setattr(vendors.shutil, "which", lambda name: None)
    return tmp_path


def put(path):
    path.parent.mkdir(parents=True)
    path.touch()


def test_without_module_or_compiler_the_reason_names_the_tools_and_the_next_back_end_serves(host):
    reason = "flashinfer must compile this and has no nvcc and no ninja"
    assert mla_prefill_vendors.needs_flashinfer(HOPPER) == needs_flashinfer_mla(HOPPER) == reason
    flashinfer = next(backend for backend in mla_prefill.VARLEN_BACKENDS if backend.name == "flashinfer")
    assert choose([flashinfer, Backend("triton", print)], HOPPER).name == "triton"


def test_nvcc_and_ninja_are_enough(host, monkeypatch):
    put(host / "cuda" / "bin" / "nvcc")
    assert needs_flashinfer_mla(HOPPER).endswith("has no ninja")
    monkeypatch.setattr(vendors.shutil, "which", lambda name: "/usr/bin/" + name)
    assert needs_flashinfer_mla(HOPPER) is None


def test_a_toolkit_that_flashinfer_does_not_find_is_none(host, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(sys.modules["flashinfer.jit.cpp_ext"], "get_cuda_path", nowhere)
    assert "no nvcc" in mla_prefill_vendors.needs_flashinfer(HOPPER)


def test_prebuilt_modules_are_enough_when_all_are_there(host):
    put(host / "aot" / MLA_MODULES[0] / f"{MLA_MODULES[0]}.so")
    assert needs_flashinfer_modules(MLA_MODULES[0])(HOPPER) is None
    assert needs_flashinfer_mla(HOPPER) is not None
    put(host / "aot" / MLA_MODULES[1] / f"{MLA_MODULES[1]}.so")
    assert needs_flashinfer_mla(HOPPER) is None
