"""DeepSeek-V3 / R1 as a family: MLA attention, wide mixture-of-experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.model.base import Candidate, Model, ModelOptions
from headrace.model.deepseek import loading
from headrace.model.deepseek.config import ARCHITECTURES, ModelConfig


class DeepSeek:
    """See headrace.model.base.Family."""

    name = "deepseek"

    def serves(self, config: Mapping[str, Any]) -> bool:
        """By the architecture's name."""
        return any(name in ARCHITECTURES for name in config.get("architectures") or ())

    def load(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        """The plain model on a CPU or in exact mode, the fused one on an accelerator."""
        return loading.load(directory, device, options)

    def candidates(self, directory: Path, device: torch.device, options: ModelOptions) -> list[Candidate]:
        """fp32 and bf16 where both are open; our C kernels where they take this model."""
        config = ModelConfig.load(directory)
        return loading.fast_candidates(config, device, options.dtype, options.kernels)

    def trial(self, directory: Path, device: torch.device, options: ModelOptions) -> Model:
        """The first dense and the first expert layer."""
        return loading.load_trial(directory, device, options)
