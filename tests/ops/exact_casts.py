"""Float casts of Triton's interpreter, made those of the GPU.

Triton 3.6's interpreter truncates fp32 to bf16, and a cast to e4m3 that rounds up to the next power of two loses half its
value. `use()` replaces both by torch's (nearest even; e4m3 saturates at 448, as `cvt.rn.satfinite` does), so that tests
on a CPU need no wider bounds than on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch


def use() -> None:
    """Once in a process, before an interpreted kernel is called. Harmless to repeat."""
    import triton.language as tl
    from triton.runtime import interpreter

    torch_dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
                    tl.float8e4nv: torch.float8_e4m3fn}  # fmt: skip
    original = getattr(interpreter._convert_float, "original", interpreter._convert_float)

    def convert(values, source, target, rounding_mode):
        if source not in torch_dtypes or target not in torch_dtypes:
            return original(values, source, target, rounding_mode)
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
        raw = np.ascontiguousarray(values).reshape(-1)
        raw = torch.from_numpy(raw.view(bits[raw.dtype.itemsize]).copy()).view(torch_dtypes[source])
        raw = raw.float().clamp(-448, 448) if target == tl.float8e4nv else raw
        made = raw.to(torch_dtypes[target])
        return made.view(integers[made.element_size()]).numpy().reshape(np.shape(values))

    convert.original = original
    interpreter._convert_float = convert
