"""What a device gives at best: the rates that rooflines are drawn with. `bench/kernels/harness.py` measures them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """What this device gave in this run.

    fp8_tflops             with fp32 accumulation, as DeepSeek's block format needs it: the best of tensor-wise and row-wise
                           scales. The limits of our ops use it
    fp8_fast_accum_tflops  with the tensor cores' own narrower accumulator; for comparison
    """

    copy_gb_s: float
    bf16_tflops: float
    fp8_tflops: float
    fp8_fast_accum_tflops: float = 0.0

    def limit_us(self, num_bytes: float, flops: float = 0.0, dtype: str = "bf16") -> float:
        """The roofline time of one call: bytes over the copy rate or FLOP over the rate of `dtype` (bf16 or fp8)."""
        rate = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops}[dtype]
        return max(num_bytes / self.copy_gb_s * 1e-3, flops / rate * 1e-6)
