"""From a Hugging Face directory to a model on a device: `load`, and the plain model's builder.

`weights/checkpoint.py` reads and checks the files, `fused_builder.py` builds the model of accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ConfigError
from headrace.model.base import Candidate, ModelOptions
from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.names import expected_mtp_tensors, expected_tensors
from headrace.model.deepseek.reference import Attention, Block, DenseFfn, Kernels, MoE, Transformer, why_not_c
from headrace.model.weights import precision
from headrace.model.weights.checkpoint import CheckpointFiles
from kernels.experts import gate

if TYPE_CHECKING:
    from headrace.model.deepseek.fused import FusedTransformer

__all__ = ["expected_mtp_tensors", "expected_tensors", "load_transformer"]

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def fast_candidates(
    config: ModelConfig, device: torch.device, dtype: torch.dtype | None, family: str | None
) -> list[Candidate]:
    """What fast mode could compute with; first what exact mode does."""
    in_fp32_only = family == "c"
    dtypes = (dtype,) if dtype is not None else (torch.float32,) if in_fp32_only else (torch.float32, torch.bfloat16)
    return [Candidate(x, family or ("torch" if why_not_c(config, device, x) else "c")) for x in dtypes]


def load_transformer(
    directory: str | Path, *, device: str | torch.device = "cpu", exact: bool, **options: Any
) -> Transformer | FusedTransformer:
    """`load` with its options by name (headrace.model.base.ModelOptions)."""
    return load(directory, torch.device(device), ModelOptions(exact=exact, **options))


def load(directory: str | Path, device: torch.device, options: ModelOptions) -> Transformer | FusedTransformer:
    """Load an HF-layout DeepSeek-V3 directory: a FusedTransformer on a GPU, a Transformer on a CPU or in exact mode.

    Exact mode is fp32 whatever dtype is asked, a GPU computes in bf16 and in the weights' own formats. On a CPU a dtype or kernels
    that are None are the first of `fast_candidates`. Raises CheckpointError for a config or tensors that cannot be served,
    ConfigError for a format that this device or mode does not have, BackendUnavailable for kernels that cannot run here.
    """
    on_gpu = device.type != "cpu" and not options.exact
    refuse_formats(on_gpu, options.exact, options.weight_dtype, options.kv_dtype)
    checkpoint = CheckpointFiles(directory, ModelConfig.load(directory))
    if on_gpu:
        made = load_fused_transformer(checkpoint, device, options.weight_dtype, options.kv_dtype)
    else:
        made = _builder(checkpoint, device, options).transformer()
    chunks = {"dp_tokens": options.moe_dp_chunk_tokens, "activation_tokens": options.moe_activation_chunk_tokens}
    return made.with_chunks(**chunks) if any(chunks.values()) else made


def load_trial(directory: str | Path, device: torch.device, options: ModelOptions) -> Transformer:
    """The first dense and the first expert layer alone, on a CPU, for timing."""
    return _builder(CheckpointFiles(directory, ModelConfig.load(directory)), device, options).trial()


def _builder(checkpoint: CheckpointFiles, device: torch.device, options: ModelOptions) -> _Builder:
    if options.exact:
        return _Builder(checkpoint, device, torch.float32, True, options.kernels, options.kv_dtype)
    first = fast_candidates(checkpoint.config, device, options.dtype, options.kernels)[0]
    return _Builder(checkpoint, device, first.dtype, False, first.kernels, options.kv_dtype, options.timed)


def refuse_formats(on_gpu: bool, exact: bool, weight_dtype: str, kv_dtype: str) -> None:
    """Raises ConfigError where these formats do not exist."""
    if weight_dtype and (not on_gpu or weight_dtype not in precision.RECIPES):
        served = (
            f"one of {', '.join(precision.RECIPES)}, or left open" if on_gpu else "left open on a CPU and in exact mode"
        )
        raise ConfigError(f"engine.weight_dtype = {weight_dtype!r} must be {served}", field="engine.weight_dtype")
    formats = ("bf16", "fp8") if on_gpu else ("fp32",) if exact else ("fp32", "bf16")
    if kv_dtype and kv_dtype not in formats:
        where = "on a GPU" if on_gpu else "in exact mode" if exact else "on a CPU"
        raise ConfigError(
            f"engine.kv_dtype = {kv_dtype!r}: {where} it is one of {', '.join(formats)}", field="engine.kv_dtype"
        )


def load_fused_transformer(
    checkpoint: CheckpointFiles, device: torch.device, weight_dtype: str = "", kv_dtype: str = ""
) -> FusedTransformer:
    """The GPU model from an open checkpoint; on a CPU with reference kernels, for tests."""
    from headrace.model.deepseek.fused_builder import CheckpointSource, FusedBuilder
    from headrace.model.deepseek.fused_kernels import FusedKernels

    source = CheckpointSource(checkpoint, device, weight_dtype)
    builder = FusedBuilder(checkpoint.config, source, FusedKernels(device), pool_dtype=KV_DTYPES[kv_dtype or "bf16"])
    made = builder.transformer(mtp_tensors(checkpoint))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams will use it
    return made


def mtp_tensors(checkpoint: CheckpointFiles) -> dict[str, torch.Tensor]:
    """The tensors of the next-token layers, by name, as they are on disk."""
    config = checkpoint.config
    first = config.num_hidden_layers
    prefixes = tuple(f"model.layers.{first + i}." for i in range(config.num_nextn_predict_layers))
    names = sorted(name for name in checkpoint.names() if prefixes and name.startswith(prefixes))
    return {name: checkpoint.raw(name) for name in names}


class _Builder:
    """Reads each tensor once, onto the device, in the shape the layers want."""

    def __init__(
        self,
        checkpoint: CheckpointFiles,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool,
        kernels: str | None,
        kv_dtype: str = "",
        timed: str = "",
    ):
        self.checkpoint, self.config, self.timed = checkpoint, checkpoint.config, timed
        self.device, self.dtype, self.exact = device, dtype, exact
        self.pool_dtype = KV_DTYPES[kv_dtype or ("fp32" if exact else "bf16")]
        self.kernels = Kernels(self.config, device, dtype, exact, kernels)
        self.prepare = self.kernels.linear.prepare

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.get(name).to(device=self.device, dtype=dtype or self.dtype)

    def trial(self) -> Transformer:
        """The first dense and the first expert layer alone, for timing."""
        layers = range(self.config.num_hidden_layers)
        kinds = {self.config.is_moe_layer(layer): layer for layer in reversed(layers)}
        return self.transformer(sorted(kinds.values()), {})

    def transformer(
        self, layers: Sequence[int] | None = None, mtp: dict[str, torch.Tensor] | None = None
    ) -> Transformer:
        """All layers and the next-token layers' tensors, or only those named."""
        embedding = self.get("model.embed_tokens.weight")
        tied = self.config.tie_word_embeddings
        return Transformer(
            self.config,
            device=self.device,
            dtype=self.dtype,
            exact=self.exact,
            kernels=self.kernels,
            embedding=embedding,
            blocks=[self.block(x) for x in (range(self.config.num_hidden_layers) if layers is None else layers)],
            norm=self.get("model.norm.weight"),
            head=self.prepare(embedding if tied else self.get("lm_head.weight")),
            precision=self.precision(),
            pool_dtype=self.pool_dtype,
            mtp_tensors=mtp_tensors(self.checkpoint) if mtp is None else mtp,
        )

    def block(self, layer: int) -> Block:
        prefix = f"model.layers.{layer}."
        return Block(
            eps=self.config.rms_norm_eps,
            kernels=self.kernels,
            attention_norm=self.get(prefix + "input_layernorm.weight"),
            attention=self.attention(prefix + "self_attn."),
            ffn_norm=self.get(prefix + "post_attention_layernorm.weight"),
            ffn=self.moe(prefix + "mlp.") if self.config.is_moe_layer(layer) else self.ffn(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> Attention:
        config, lora = self.config, self.config.q_lora_rank is not None
        first = self.get(prefix + ("q_a_proj.weight" if lora else "q_proj.weight"))
        kv_b = self.get(prefix + "kv_b_proj.weight")
        per_head = kv_b.view(config.num_attention_heads, -1, config.kv_lora_rank)
        return Attention(
            config,
            self.kernels,
            qkv_a=self.prepare(torch.cat((first, self.get(prefix + "kv_a_proj_with_mqa.weight")))),
            q_norm=self.get(prefix + "q_a_layernorm.weight") if lora else None,
            q_b=self.prepare(self.get(prefix + "q_b_proj.weight")) if lora else None,
            kv_norm=self.get(prefix + "kv_a_layernorm.weight"),
            up_key=self.prepare(per_head[:, : config.qk_nope_head_dim].mT),
            up_value=self.prepare(per_head[:, config.qk_nope_head_dim :]),
            kv_b=None if self.exact else self.prepare(kv_b),
            out=self.prepare(self.get(prefix + "o_proj.weight")),
        )

    def ffn(self, prefix: str) -> DenseFfn:
        gate_up = torch.cat((self.get(prefix + "gate_proj.weight"), self.get(prefix + "up_proj.weight")))
        return DenseFfn(self.kernels, self.kernels.ffn.prepare(gate_up, self.get(prefix + "down_proj.weight")))

    def moe(self, prefix: str) -> MoE:
        config = self.config
        limits = gate.Limits(*(getattr(config, name) for name in gate.Limits._fields))
        return MoE(
            self.kernels,
            limits,
            router=self.prepare(self.get(prefix + "gate.weight", torch.float32)),
            bias=self.get(prefix + "gate.e_score_correction_bias", torch.float32),
            weights=self.kernels.ffn.prepare(*self.expert_weights(prefix + "experts.")),
            shared=self.ffn(prefix + "shared_experts.") if config.n_shared_experts else None,
        )

    def expert_weights(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [e, 2 * inner, hidden], down [e, hidden, inner]."""
        config = self.config
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        gate_up = torch.empty(experts, 2 * inner, hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(experts, hidden, inner, dtype=self.dtype, device=self.device)
        for expert in range(experts):
            gate_up[expert, :inner] = self.get(f"{prefix}{expert}.gate_proj.weight")
            gate_up[expert, inner:] = self.get(f"{prefix}{expert}.up_proj.weight")
            down[expert] = self.get(f"{prefix}{expert}.down_proj.weight")
        return gate_up, down

    def precision(self) -> list[tuple[str, str]]:
        stored = f"{self.config.quantisation} on disk, " if self.config.quantisation else ""
        packed = " (weights kept in bf16 where exact)" if self.kernels.family == "c" else ""
        products = f"{stored}{_name(self.dtype)}{packed}"
        return [
            ("embedding, head", _name(self.dtype)),
            ("attention projections", products),
            ("routed and shared experts", products),
            ("router logits, softmax", "fp32"),
            ("norm statistics", "fp32"),
            ("residual stream", _name(self.dtype)),
            ("KV rows", _name(self.pool_dtype)),
            ("kernels", self.kernels.family),
            *([("timed at load", self.timed)] if self.timed else []),
        ]


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
