"""Puts a FusedTransformer together from a source of weights: a checkpoint, or a generator (`random_weights.py`).

A source answers tensors by their checkpoint names, on the model's device, each part in the format the recipe asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from headrace.model.deepseek.config import ModelConfig
from headrace.model.deepseek.fused import FusedTransformer
from headrace.model.deepseek.fused_kernels import FusedKernels
from headrace.model.deepseek.fused_layers import FusedAttention, FusedBlock, FusedDense, FusedMoE
from headrace.model.deepseek.fused_linear import ExpertSwiglu, Swiglu
from headrace.model.weights import precision
from headrace.model.weights.checkpoint import CheckpointFiles
from headrace.model.weights.precision import Weight
from headrace.parallel.experts import ExpertExchange, LocalExchange
from kernels.experts import gate

UP, DOWN = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)


class WeightSource(Protocol):
    """Where weights come from.

    plain(name)                       a tensor that no recipe touches, in the dtype it has (bf16 or fp32)
    part(part, names)                 the matrices of these names, joined by rows, in the part's format
    experts(prefix, names, ids)       for each expert id, its matrices of these names joined; stacked [e, out, in]
    formats                           part -> formats used so far, with the reason where it is not the recipe's
    """

    formats: Mapping[str, set[str]]

    def plain(self, name: str) -> torch.Tensor: ...

    def part(self, part: str, names: Sequence[str]) -> Weight: ...

    def experts(self, prefix: str, names: Sequence[str], ids: range) -> Weight: ...


class FusedBuilder:
    """One model. `exchange` is what every MoE layer sends tokens through (None: all experts are here)."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kernels: FusedKernels,
        *,
        pool_dtype: torch.dtype = torch.bfloat16,
        exchange: ExpertExchange | None = None,
    ):
        self.config, self.source, self.kernels = config, source, kernels
        self.exchange = exchange or LocalExchange(kernels, config.n_routed_experts)
        self.pool_dtype = pool_dtype

    def transformer(self, mtp_tensors: dict[str, torch.Tensor] | None = None) -> FusedTransformer:
        embedding = self.source.plain("model.embed_tokens.weight").bfloat16()
        tied = self.config.tie_word_embeddings
        return FusedTransformer(
            self.config,
            kernels=self.kernels,
            embedding=embedding,
            blocks=[self.block(layer) for layer in range(self.config.num_hidden_layers)],
            norm=self.gain("model.norm.weight"),
            head=embedding if tied else self.source.plain("lm_head.weight").bfloat16(),
            precision=self.precision(),
            pool_dtype=self.pool_dtype,
            mtp_tensors=mtp_tensors,
        )

    def gain(self, name: str) -> torch.Tensor:
        return self.source.plain(name).bfloat16()

    def block(self, layer: int) -> FusedBlock:
        prefix = f"model.layers.{layer}."
        return FusedBlock(
            attention_norm=self.gain(prefix + "input_layernorm.weight"),
            attention=self.attention(prefix + "self_attn."),
            ffn_norm=self.gain(prefix + "post_attention_layernorm.weight"),
            ffn=self.moe(prefix + "mlp.") if self.config.is_moe_layer(layer) else self.dense(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> FusedAttention:
        config, source, linear = self.config, self.source, self.kernels.linear
        lora = config.q_lora_rank is not None
        first = "q_a_proj.weight" if lora else "q_proj.weight"
        kv_b = source.part("kv_b", [prefix + "kv_b_proj.weight"])
        up_key, up_value = absorbed_halves(kv_b, config)
        return FusedAttention(
            config,
            self.kernels,
            qkv_a=linear(source.part("qkv_a", [prefix + first, prefix + "kv_a_proj_with_mqa.weight"])),
            q_norm=self.gain(prefix + "q_a_layernorm.weight") if lora else None,
            q_b=linear(source.part("q_b", [prefix + "q_b_proj.weight"])) if lora else None,
            kv_norm=self.gain(prefix + "kv_a_layernorm.weight"),
            kv_b=linear(kv_b),
            up_key=up_key,
            up_value=up_value,
            out=linear(source.part("o_proj", [prefix + "o_proj.weight"])),
        )

    def dense(self, prefix: str) -> FusedDense:
        return FusedDense(Swiglu(self.kernels, *self.ffn_weights("dense ffn", prefix)))

    def ffn_weights(self, part: str, prefix: str) -> tuple[Weight, Weight]:
        """gate_up [2 * inner, hidden], down [hidden, inner]."""
        return self.source.part(part, [prefix + name for name in UP]), self.source.part(part, [prefix + DOWN[0]])

    def moe(self, prefix: str) -> FusedMoE:
        config, source, exchange = self.config, self.source, self.exchange
        local = range(exchange.first_expert, exchange.first_expert + exchange.num_local)
        router = source.plain(prefix + "gate.weight")
        narrow = router.bfloat16()
        gate_up = source.experts(prefix + "experts.", UP, local)
        down = source.experts(prefix + "experts.", DOWN, local)
        shared: Swiglu | None = None
        own_rows = False
        if config.n_shared_experts:
            its_gate_up, its_down = self.ffn_weights("shared experts", prefix + "shared_experts.")
            own_rows = (
                getattr(exchange, "takes_own", False)
                and precision.alike(gate_up, its_gate_up)
                and precision.alike(down, its_down)
            )
            if own_rows:
                gate_up, down = precision.appended(gate_up, its_gate_up), precision.appended(down, its_down)
            else:
                shared = Swiglu(self.kernels, its_gate_up, its_down)
        return FusedMoE(
            self.kernels,
            gate.Limits(*(getattr(config, name) for name in gate.Limits._fields)),
            router=narrow if torch.equal(narrow.float(), router.float()) else router.float(),
            bias=source.plain(prefix + "gate.e_score_correction_bias").float(),
            experts=ExpertSwiglu(self.kernels, gate_up, down),
            shared=shared,
            exchange=exchange,
            own_rows=own_rows,
        )

    def precision(self) -> list[tuple[str, str]]:
        parts = [
            (part, " / ".join(sorted(self.source.formats[part])))
            for part in precision.PARTS
            if part in self.source.formats
        ]
        return [
            ("embedding, head", "bf16, logits fp32"),
            *parts,
            ("absorbed halves of kv_b", "bf16"),
            ("router logits, softmax", "fp32"),
            ("norm statistics", "fp32"),
            ("residual stream", "bf16"),
            ("KV rows", {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8 e4m3, scale 1"}[self.pool_dtype]),
        ]


def absorbed_halves(kv_b: Weight, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """up_key [h, n, c] and up_value [h, c, d] in bf16, from the weight that prefill uses, whatever its format."""
    wide = precision.widened(kv_b).view(config.num_attention_heads, -1, config.kv_lora_rank)
    key, value = wide[:, : config.qk_nope_head_dim], wide[:, config.qk_nope_head_dim :]
    return key.bfloat16().contiguous(), value.bfloat16().mT.contiguous()


class CheckpointSource:
    """Reads each tensor once, straight to the device; formats as on disk unless `weight_dtype` names a recipe."""

    def __init__(self, checkpoint: CheckpointFiles, device: torch.device, weight_dtype: str = ""):
        self.checkpoint, self.device = checkpoint, device
        self.recipe = precision.RECIPES[weight_dtype] if weight_dtype else None
        self.formats: dict[str, set[str]] = {}

    def plain(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(name).to(self.device)

    def part(self, part: str, names: Sequence[str]) -> Weight:
        weights = [self._on_device(self.checkpoint.weight(name)) for name in names]
        return precision.joined(weights, self._format(part, weights))

    def experts(self, prefix: str, names: Sequence[str], ids: range) -> Weight:
        return precision.stacked(
            [self.part("experts", [f"{prefix}{expert}.{name}" for name in names]) for expert in ids]
        )

    def _on_device(self, weight: Weight) -> Weight:
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device)
        return type(weight)(*(None if part is None else part.to(self.device) for part in weight))

    def _format(self, part: str, weights: Sequence[Weight]) -> str:
        on_disk = {precision.format_of(weight) for weight in weights}
        kept = on_disk.pop() if len(on_disk) == 1 else "bf16"
        wanted = self.recipe[part] if self.recipe else kept
        shapes = [precision.shape_of(weight) for weight in weights]
        reason = precision.why_not(wanted, part, sum(shape[-2] for shape in shapes), shapes[0][-1])
        if wanted == kept == "fp8" and not precision.blocks_join([shape[-2] for shape in shapes]):
            reason = "the blocks of its matrices do not join"
        used = "bf16" if reason else wanted
        source = "" if kept == used else f" from {kept}"
        self.formats.setdefault(part, set()).add(f"{used}{source}" + (f" ({wanted} asked: {reason})" if reason else ""))
        return used
