"""From a Hugging Face directory to a Transformer: the one table of checkpoint names, and what is done to the bytes.

Takes bf16, fp16 or fp32 tensors and DeepSeek's FP8 (e4m3 with 128 x 128 `weight_scale_inv`), in one file or sharded.
Every tensor that is missing, extra or misshapen is named, all in one CheckpointError, before any weight is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.model.config import ModelConfig
from headrace.model.deepseek import Attention, Block, DenseFfn, Kernels, MoE, Transformer
from kernels import fp8_linear, gate
from kernels.select import choose

MAX_PROBLEMS_NAMED = 50
FLOATS = {"F32", "F16", "BF16"}
FP8 = "F8_E4M3"
SCALE = "_scale_inv"


@dataclass(frozen=True)
class Wanted:
    """A tensor the checkpoint should hold. `quantisable`: may be FP8. `optional`: a copy we can do without."""

    shape: tuple[int, ...]
    quantisable: bool = False
    optional: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, Wanted]:
    """Every tensor name of this architecture without its MTP layers, by checkpoint name."""
    table = {
        "model.embed_tokens.weight": Wanted((config.vocab_size, config.hidden_size)),
        "model.norm.weight": Wanted((config.hidden_size,)),
        "lm_head.weight": Wanted((config.vocab_size, config.hidden_size), optional=config.tie_word_embeddings),
    }
    for layer in range(config.num_hidden_layers):
        table.update(_layer_tensors(config, layer))
    return table


def expected_mtp_tensors(config: ModelConfig) -> dict[str, Wanted]:
    """The next-token layers: one decoder layer each, its norms, its projection, and optional embedding copies."""
    hidden, table = config.hidden_size, {}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        table.update(_layer_tensors(config, layer))
        copy = Wanted((config.vocab_size, hidden), optional=True)
        own = {
            "enorm.weight": Wanted((hidden,)),
            "hnorm.weight": Wanted((hidden,)),
            "eh_proj.weight": Wanted((hidden, 2 * hidden)),
            "shared_head.norm.weight": Wanted((hidden,)),
            "shared_head.head.weight": copy,
            "embed_tokens.weight": copy,
        }
        table.update({f"model.layers.{layer}.{name}": wanted for name, wanted in own.items()})
    return table


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, Wanted]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rows = heads * config.qk_head_dim
    table = {
        "input_layernorm.weight": Wanted((hidden,)),
        "post_attention_layernorm.weight": Wanted((hidden,)),
        "self_attn.kv_a_proj_with_mqa.weight": Wanted((config.row_dim, hidden), True),
        "self_attn.kv_a_layernorm.weight": Wanted((config.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": Wanted(
            (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), True
        ),
        "self_attn.o_proj.weight": Wanted((hidden, heads * config.v_head_dim), True),
    }
    if config.q_lora_rank is None:
        table["self_attn.q_proj.weight"] = Wanted((q_rows, hidden), True)
    else:
        table["self_attn.q_a_proj.weight"] = Wanted((config.q_lora_rank, hidden), True)
        table["self_attn.q_a_layernorm.weight"] = Wanted((config.q_lora_rank,))
        table["self_attn.q_b_proj.weight"] = Wanted((q_rows, config.q_lora_rank), True)
    if not config.is_moe_layer(layer):
        table.update(_ffn_tensors("mlp", hidden, config.intermediate_size))
    else:
        table["mlp.gate.weight"] = Wanted((config.n_routed_experts, hidden))
        table["mlp.gate.e_score_correction_bias"] = Wanted((config.n_routed_experts,))
        for expert in range(config.n_routed_experts):
            table.update(_ffn_tensors(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size))
        if config.n_shared_experts:
            inner = config.moe_intermediate_size * config.n_shared_experts
            table.update(_ffn_tensors("mlp.shared_experts", hidden, inner))
    return {f"model.layers.{layer}.{name}": wanted for name, wanted in table.items()}


def _ffn_tensors(prefix: str, hidden: int, inner: int) -> dict[str, Wanted]:
    return {
        f"{prefix}.gate_proj.weight": Wanted((inner, hidden), True),
        f"{prefix}.up_proj.weight": Wanted((inner, hidden), True),
        f"{prefix}.down_proj.weight": Wanted((hidden, inner), True),
    }


class Checkpoint:
    """The safetensors files of a directory: which tensors there are, checked, and one at a time, dequantised."""

    def __init__(self, directory: str | Path, config: ModelConfig):
        self.directory, self.config = Path(directory), config
        self._files = {path: _open(path) for path in self._paths()}
        self._place = {name: path for path, file in self._files.items() for name in file.keys()}
        self._dequantise = choose(fp8_linear.BACKENDS, torch.device("cpu"), op="kernels.fp8_linear").run
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
        """As it is on disk."""
        return self._files[self._place[name]].get_tensor(name)

    def get(self, name: str) -> torch.Tensor:
        """The tensor's values; FP8 is dequantised to fp32."""
        tensor = self.raw(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return self._dequantise(tensor, self.raw(name + SCALE), self._block())

    def _block(self) -> tuple[int, int]:
        return self.config.fp8_block or (128, 128)

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
        scales = set()
        for name, want in wanted.items():
            if name not in self:
                if not want.optional:
                    yield f"missing {name}"
                continue
            view = self._slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if shape != want.shape:
                yield f"{name} is {list(shape)}, expected {list(want.shape)}"
            if dtype == FP8 and want.quantisable:
                scales.add(name + SCALE)
                yield from self._scale_problems(name, want.shape)
            elif dtype not in FLOATS:
                yield f"{name} has dtype {dtype}, expected bf16, fp16 or fp32{' or fp8' if want.quantisable else ''}"
        for name in sorted(self.names() - set(wanted) - scales):
            if not name.endswith("rotary_emb.inv_freq"):
                yield f"extra {name}"

    def _scale_problems(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        expected = [-(-side // block) for side, block in zip(shape, self._block(), strict=True)]
        if name + SCALE not in self:
            yield f"missing {name + SCALE}"
        elif list(self._slice(name + SCALE).get_shape()) != expected:
            yield f"{name + SCALE} is {list(self._slice(name + SCALE).get_shape())}, expected {expected}"


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def choose_dtype(device: torch.device, exact: bool) -> torch.dtype:
    """The dtype of matrix products: fp32 in exact mode, bf16 on accelerators, and on a CPU whichever is faster here."""
    if exact:
        return torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _seconds(torch.bfloat16) < 0.8 * _seconds(torch.float32) else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    """Best of five: a batch of 32 through a [1024, 512] linear."""
    x, weight = torch.ones(32, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        F.linear(x, weight)
        times.append(time.perf_counter() - start)
    return min(times)


def load_transformer(
    directory: str | Path,
    *,
    device: str | torch.device = "cpu",
    exact: bool,
    dtype: torch.dtype | None = None,
    kernels: str | None = None,
) -> Transformer:
    """Load an HF-layout DeepSeek-V3 directory.

    `dtype` is that of the matrix products (None: `choose_dtype`); exact mode is fp32 whatever is asked. `kernels`: "c"
    (cpu.c) or "torch", None for the first that can run. Raises CheckpointError for a config or tensors that cannot be
    served, BackendUnavailable for kernels that cannot run here.
    """
    config = ModelConfig.load(directory)
    device = torch.device(device)
    dtype = torch.float32 if exact else dtype or choose_dtype(device, exact)
    return _Builder(Checkpoint(directory, config), device, dtype, exact, kernels).transformer()


class _Builder:
    """Reads each tensor once, onto the device, in the shape the layers want."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, exact: bool, kernels: str | None
    ):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.device, self.dtype, self.exact = device, dtype, exact
        self.kernels = Kernels(self.config, device, dtype, exact, kernels)
        self.prepare = self.kernels.linear.prepare

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.get(name).to(device=self.device, dtype=dtype or self.dtype)

    def transformer(self) -> Transformer:
        embedding = self.get("model.embed_tokens.weight")
        tied = self.config.tie_word_embeddings
        return Transformer(
            self.config,
            device=self.device,
            dtype=self.dtype,
            exact=self.exact,
            kernels=self.kernels,
            embedding=embedding,
            blocks=[self.block(layer) for layer in range(self.config.num_hidden_layers)],
            norm=self.get("model.norm.weight"),
            head=self.prepare(embedding if tied else self.get("lm_head.weight")),
            precision=self.precision(),
            mtp_tensors={name: self.checkpoint.raw(name) for name in self._mtp_names()},
        )

    def _mtp_names(self) -> list[str]:
        first = self.config.num_hidden_layers
        prefixes = tuple(f"model.layers.{first + i}." for i in range(self.config.num_nextn_predict_layers))
        return sorted(name for name in self.checkpoint.names() if prefixes and name.startswith(prefixes))

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
        stored = "fp8 128x128 on disk, " if self.config.fp8_block else ""
        packed = " (weights kept in bf16 where exact)" if self.kernels.family == "c" else ""
        products = f"{stored}{_name(self.dtype)}{packed}"
        kv = _name(torch.float32 if self.exact else torch.bfloat16)
        return [
            ("embedding, head", _name(self.dtype)),
            ("attention projections", products),
            ("routed and shared experts", products),
            ("router logits, softmax", "fp32"),
            ("norm statistics", "fp32"),
            ("residual stream", _name(self.dtype)),
            ("KV rows", kv),
            ("kernels", self.kernels.family),
        ]


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
