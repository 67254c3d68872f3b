"""The safetensors files of a directory: which tensors there are, checked, and one weight at a time.

Takes bf16, fp16 or fp32 tensors, DeepSeek's FP8 (e4m3 with `weight_scale_inv`) and NVFP4 as ModelOpt or
compressed-tensors name it, in one file or sharded. Every tensor that is missing, extra or misshapen is named, all in one
CheckpointError, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.names import Wanted, expected_mtp_tensors, expected_tensors
from headrace.model.weights.precision import Weight, format_of, widened
from headrace.model.weights.quantisation import NVFP4_GROUP
from kernels.formats import fp8
from kernels.formats.fp8 import Fp8Weight
from kernels.formats.nvfp4 import Nvfp4Weight
from kernels.linear import fp8_linear
from kernels.select import choose

MAX_PROBLEMS_NAMED = 50
FLOATS = {"F32", "F16", "BF16"}
FP8 = "F8_E4M3"
SCALE = "_scale_inv"
IGNORED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")  # KV scales: our rows have a scale of 1


class CheckpointFiles:
    """An open directory. `weight` answers what is on disk, `get` its values."""

    def __init__(self, directory: str | Path, config: ModelConfig):
        self.directory, self.config = Path(directory), config
        self._files = {path: _open(path) for path in self._paths()}
        self._place = {name: path for path, file in self._files.items() for name in file.keys()}
        self._dequantise = choose(fp8_linear.BACKENDS, torch.device("cpu"), op="kernels.linear.fp8_linear").run
        self._check()

    def _paths(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: not a safetensors index: {error!r}") from error
            missing = [name for name in names if not (self.directory / name).is_file()]
            if missing:
                raise CheckpointError(f"{index}: names files that are not there: {', '.join(missing)}")
            return [self.directory / name for name in names]
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.directory}: holds no safetensors file")
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def _slice(self, name: str):
        return self._files[self._place[name]].get_slice(name)

    def names(self) -> set[str]:
        return set(self._place)

    def raw(self, name: str) -> torch.Tensor:
        """One tensor of a file, as it is."""
        return self._files[self._place[name]].get_tensor(name)

    def weight(self, name: str) -> Weight:
        """A weight in the format it has on disk, on the CPU; FP8 in other blocks than 128 x 128 comes as fp32."""
        packed = next((p for p in (name, name + "_packed") if p in self and self._slice(p).get_dtype() == "U8"), None)
        if packed is not None:
            return self._nvfp4(name, packed)
        tensor = self.raw(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        scale = self.raw(name + SCALE).float()
        if self._block() == (fp8.GROUP, fp8.GROUP):
            return Fp8Weight(tensor, scale)
        return self._dequantise(tensor, scale, self._block())

    def _nvfp4(self, name: str, packed: str) -> Nvfp4Weight:
        """compressed-tensors stores the reciprocals of the two global scales."""
        stem, theirs = name.removesuffix("weight"), packed != name
        scale = self.raw(name + ("_global_scale" if theirs else "_scale_2")).float().reshape(())
        activation = stem + ("input_global_scale" if theirs else "input_scale")
        given = self.raw(activation).float().reshape(()) if activation in self else None
        if theirs:
            scale, given = 1 / scale, None if given is None else 1 / given
        return Nvfp4Weight(self.raw(packed), self.raw(name + "_scale"), scale, given)

    def get(self, name: str) -> torch.Tensor:
        """The tensor's values; what is quantised comes as fp32."""
        weight = self.weight(name)
        return weight if format_of(weight) == "bf16" else widened(weight)

    def _block(self) -> tuple[int, int]:
        declared = self.config.quantisation
        return declared.block if declared is not None and declared.format == "fp8" else (fp8.GROUP, fp8.GROUP)

    def _check(self) -> None:
        mtp = expected_mtp_tensors(self.config)
        if not any(name in self for name in mtp):
            mtp = {}
        wanted = expected_tensors(self.config) | mtp
        problems = list(self._problems(wanted))
        if problems:
            more = len(problems) - MAX_PROBLEMS_NAMED
            tail = [f"and {more} more"] if more > 0 else []
            raise CheckpointError(f"{self.directory}: " + "; ".join(problems[:MAX_PROBLEMS_NAMED] + tail))

    def _problems(self, wanted: dict[str, Wanted]) -> Iterator[str]:
        known = set(wanted)
        for name, want in wanted.items():
            if want.quantisable and self._holds_nvfp4(name):
                companions = self._nvfp4_tensors(name, want.shape)
                known |= set(companions)
                yield from self._companion_problems(companions)
                continue
            if name not in self:
                if not want.optional:
                    yield f"missing {name}"
                continue
            view = self._slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if shape != want.shape:
                yield f"{name} is {list(shape)}, expected {list(want.shape)}"
            if dtype == FP8 and want.quantisable:
                known.add(name + SCALE)
                yield from self._companion_problems({name + SCALE: self._scale_shape(want.shape)})
            elif dtype not in FLOATS:
                quantised = " or fp8 or nvfp4" if want.quantisable else ""
                yield f"{name} has dtype {dtype}, expected bf16, fp16 or fp32{quantised}"
        for name in sorted(self.names() - known):
            if not name.endswith(IGNORED):
                yield f"extra {name}"

    def _holds_nvfp4(self, name: str) -> bool:
        return name + "_packed" in self or (name in self and self._slice(name).get_dtype() == "U8")

    def _nvfp4_tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...] | None]:
        """Every tensor of one NVFP4 weight -> its shape; None: one value, and it may be missing."""
        theirs, stem = name + "_packed" in self, name.removesuffix("weight")
        rows, columns = shape
        return {
            name + "_packed" if theirs else name: (rows, columns // 2),
            name + "_scale": (rows, columns // NVFP4_GROUP),
            name + ("_global_scale" if theirs else "_scale_2"): (),
            stem + ("input_global_scale" if theirs else "input_scale"): None,
        }

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-side // block) for side, block in zip(shape, self._block(), strict=True))

    def _companion_problems(self, expected: dict[str, tuple[int, ...] | None]) -> Iterator[str]:
        for name, shape in expected.items():
            if name not in self:
                if shape is not None:
                    yield f"missing {name}"
                continue
            found = tuple(self._slice(name).get_shape())
            if found != (shape or ()) and not (not shape and found == (1,)):
                yield f"{name} is {list(found)}, expected {list(shape or ())}"


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
