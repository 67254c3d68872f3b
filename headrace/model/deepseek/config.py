"""ModelConfig: what a checkpoint's config.json says, under the same names.

No torch here: the router reads this file too. Anything we cannot compute exactly as Hugging Face would is refused with
the field's name, all fields in one CheckpointError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.weights import quantisation
from headrace.model.weights.quantisation import Quantisation

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, as in `rope_scaling` (old key) or `rope_parameters` (transformers 5). Lengths in tokens."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek-V3-class model. Every field is named as in config.json; sizes are in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleave: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    quantisation: Quantisation | None  # from quantization_config, or hf_quant_config.json beside config.json

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read `directory/config.json`, and ModelOpt's hf_quant_config.json where there is one.

        Raises CheckpointError naming every field that cannot be served.
        """
        path = Path(directory) / "config.json"
        beside = path.with_name("hf_quant_config.json")
        return cls.from_dict(_object(path), where=str(path), beside=_object(beside) if beside.exists() else None)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, where: str = "config", beside: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Check and convert a parsed config.json. Raises CheckpointError naming every field that cannot be served."""
        reader = _Reader(raw, beside)
        config = reader.read()
        if reader.problems:
            raise CheckpointError(f"{where}: " + "; ".join(reader.problems))
        assert config is not None
        return config

    @property
    def row_dim(self) -> int:
        """Values one token of one layer stores: latent (normed) ++ rope (rotated)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(nope + rope) ** -0.5, times the square of YaRN's mscale when `mscale_all_dim` is set."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is None or not self.rope_scaling.mscale_all_dim:
            return scale
        return scale * yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` (MTP layers count on from num_hidden_layers) holds experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def _object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return raw


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_POSITIVE = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_experts_per_tok n_group topk_group moe_layer_freq "
    "max_position_embeddings"
).split()
_COUNTS = "n_shared_experts first_k_dense_replace num_nextn_predict_layers".split()
_REQUIRED = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_experts_per_tok"
).split()
_DEFAULTS: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 4096,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "ep_size": 1,
    "pretraining_tp": 1,
    "model_type": "deepseek_v3",
}


class _Reader:
    """Reads one config.json and collects what is wrong with it instead of stopping at the first problem."""

    def __init__(self, raw: Mapping[str, Any], beside: Mapping[str, Any] | None = None):
        self.raw, self.beside = raw, beside
        self.problems: list[str] = []

    def read(self) -> ModelConfig | None:
        values: dict[str, Any] = {"architecture": self._architecture()}
        for name, only in _ONLY.items():
            if self.raw.get(name, only) not in (only, None):
                self._refuse(name, f"only {only!r} is supported")
        for name in _POSITIVE:
            values[name] = self._integer(name, least=1)
        for name in _COUNTS:
            values[name] = self._integer(name, least=0)
        values["q_lora_rank"] = None if self.raw.get("q_lora_rank") is None else self._integer("q_lora_rank", least=1)
        values.update(self._floats(), **self._flags(), **self._tokens(), **self._rope())
        values["quantisation"] = self._quantisation()
        if not self.problems:
            self._check_together(values)
        if self.problems:
            return None
        return ModelConfig(**{field.name: values[field.name] for field in fields(ModelConfig)})

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name}={self.raw.get(name)!r}: {why}")

    def _architecture(self) -> str:
        named = self.raw.get("architectures") or []
        if len(named) == 1 and named[0] in ARCHITECTURES:
            return named[0]
        self._refuse("architectures", f"served are {', '.join(ARCHITECTURES)}")
        return ""

    def _integer(self, name: str, *, least: int) -> int:
        value = self.raw.get(name)
        if name == "num_nextn_predict_layers" and value is None:
            value = self.raw.get("num_mtp_layers")
        if value is None and name in _DEFAULTS:
            return _DEFAULTS[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(name, f"must be an integer of at least {least}" if value is not None else "is missing")
            return least
        return value

    def _floats(self) -> dict[str, float]:
        found = {}
        for name, default in (("routed_scaling_factor", 1.0), ("rms_norm_eps", 1e-6)):
            value = self.raw.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                self._refuse(name, "must be a positive number")
                value = default
            found[name] = float(value)
        return found

    def _flags(self) -> dict[str, bool]:
        found = {}
        for name, default in (("norm_topk_prob", True), ("tie_word_embeddings", False), ("rope_interleave", True)):
            value = self.raw.get(name, default)
            found[name] = default if value is None else value
            if not isinstance(found[name], bool):
                self._refuse(name, "must be true or false")
        return found

    def _tokens(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = self.raw.get(name)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if any(token is not None and (isinstance(token, bool) or not isinstance(token, int)) for token in ids):
                self._refuse(name, "must be a token id")
            found[name] = tuple(value) if isinstance(value, list) else value
        return found

    def _rope(self) -> dict[str, Any]:
        """Old keys `rope_theta` + `rope_scaling`, or transformers 5's single `rope_parameters`."""
        name = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        rope = self.raw.get(name) or {}
        if not isinstance(rope, dict):
            self._refuse(name, "must be an object")
            rope = {}
        theta = rope.get("rope_theta", self.raw.get("rope_theta", 10000.0))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            self._refuse("rope_theta", "must be a positive number")
            theta = 10000.0
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "yarn"):
            self._refuse(name, "only yarn and default are supported")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            self._refuse(name, "partial_rotary_factor must be 1")
        return {"rope_theta": float(theta), "rope_scaling": self._yarn(name, rope) if kind == "yarn" else None}

    def _yarn(self, name: str, rope: Mapping[str, Any]) -> RopeScaling | None:
        known = {field.name for field in fields(RopeScaling)}
        values = {key: value for key, value in rope.items() if key in known and value is not None}
        original = values.setdefault("original_max_position_embeddings", self.raw.get("max_position_embeddings"))
        if "factor" not in values and original:
            values["factor"] = self.raw.get("max_position_embeddings", 0) / original
        try:
            scaling = RopeScaling(**values)
            if scaling.factor > 0 and scaling.original_max_position_embeddings > 0:
                return scaling
        except TypeError:
            pass
        self._refuse(name, "yarn needs a positive factor and original_max_position_embeddings")
        return None

    def _quantisation(self) -> Quantisation | None:
        try:
            return quantisation.read(self.raw, self.beside)
        except ValueError as error:
            self._refuse("quantization_config", str(error))
            return None

    def _check_together(self, values: Mapping[str, Any]) -> None:
        experts, groups = values["n_routed_experts"], values["n_group"]
        if experts % groups:
            self._refuse("n_group", f"must divide n_routed_experts={experts}")
        elif experts // groups < 2 and groups > 1:
            self._refuse("n_group", "a group's score is the sum of its two best experts: groups need at least two")
        elif values["topk_group"] > groups:
            self._refuse("topk_group", f"must not exceed n_group={groups}")
        elif values["num_experts_per_tok"] > experts // groups * values["topk_group"]:
            self._refuse("num_experts_per_tok", "exceeds the experts of the kept groups")
        if values["qk_rope_head_dim"] % 2:
            self._refuse("qk_rope_head_dim", "rope rotates pairs: must be even")
        if not values["rope_interleave"]:
            self._refuse("rope_interleave", "only interleaved pairs (true) are supported")
