"""The tiny DeepSeek-V3 as it is trained: flat functions over [num_tokens, width], attention between them.

All experts of a layer, the shared one included, are computed as one wide SwiGLU whose hidden units are multiplied by the
routing weight (zero for an expert that was not chosen). That is the MoE result exactly, without a sort or a gather, and
for experts this small it is several times faster. Sources: DeepSeek-V3 report 2.1 (MLA, routing) and 2.2 (MTP).

Parameters are fp32 masters, cast in the functions to the dtype of the residual stream; norms, router and loss are fp32.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.settings import ModelShape

NUM_KINDS = 5


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, statistics in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope over interleaved pairs. x [num_tokens, heads, rope_dim]; cos, sin [num_tokens, rope_dim / 2] fp32."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).to(x.dtype)


def before_attention(x: Tensor, layer: "Attention", cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of every token: three [num_tokens, num_heads, head_dim]."""
    shape, count, dtype = layer.shape, x.shape[0], x.dtype
    h = rms_norm(x, layer.input_norm, shape.norm_epsilon)
    query = rms_norm(h @ layer.q_a.to(dtype).T, layer.q_a_norm, shape.norm_epsilon) @ layer.q_b.to(dtype).T
    query = query.view(count, shape.num_heads, shape.head_dim)
    latent, rope = (h @ layer.kv_a.to(dtype).T).split((shape.kv_lora_rank, shape.rope_dim), -1)
    expanded = rms_norm(latent, layer.kv_a_norm, shape.norm_epsilon) @ layer.kv_b.to(dtype).T
    key, value = expanded.view(count, shape.num_heads, -1).split((shape.nope_dim, shape.v_dim), -1)
    query_nope, query_rope = query.split((shape.nope_dim, shape.rope_dim), -1)
    rope = rotate(rope[:, None], cos, sin).expand(-1, shape.num_heads, -1)
    query = torch.cat((query_nope, rotate(query_rope, cos, sin)), -1)
    return query, torch.cat((key, rope), -1), value.contiguous()


def after_attention(x: Tensor, mixed: Tensor, layer: "Attention") -> tuple[Tensor, Tensor]:
    """Residual stream with attention's result added, and its norm for the feed-forward half."""
    x = x + mixed.reshape(x.shape[0], -1) @ layer.o.to(x.dtype).T
    return x, rms_norm(x, layer.post_norm, layer.shape.norm_epsilon)


def dense_half(x: Tensor, mixed: Tensor, layer: "DenseLayer") -> Tensor:
    """Second half of a dense layer: output projection, norm, SwiGLU."""
    x, h = after_attention(x, mixed, layer.attention)
    gate, up, down = (weight.to(x.dtype) for weight in (layer.gate, layer.up, layer.down))
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def _outranked(scores: Tensor) -> Tensor:
    """How many entries of the last dimension beat each one; ties go to the lower index."""
    size = scores.shape[-1]
    index = torch.arange(size, device=scores.device)
    earlier = index[:, None] > index[None, :]  # [i, j]: j comes before i
    mine, other = scores[..., :, None], scores[..., None, :]
    return ((other > mine) | ((other == mine) & earlier)).sum(-1)


def choose_experts(scores: Tensor, bias: Tensor, shape: ModelShape) -> Tensor:
    """Group-limited top-k by counting. scores [num_tokens, num_experts] fp32 -> bool, experts_per_token set a row."""
    biased = scores + bias
    grouped = biased.unflatten(-1, (shape.num_groups, -1))
    group_score = (grouped * (_outranked(grouped) < 2)).sum(-1)
    kept = _outranked(group_score) < shape.groups_kept
    masked = torch.where(kept[..., None], grouped, -1e9).flatten(-2)
    return _outranked(masked) < shape.experts_per_token


def expert_half(x: Tensor, mixed: Tensor, layer: "ExpertLayer") -> tuple[Tensor, Tensor]:
    """Second half of a mixture layer; also the number of tokens per expert [num_experts]."""
    shape = layer.attention.shape
    x, h = after_attention(x, mixed, layer.attention)
    scores = F.linear(h.float(), layer.router).sigmoid()
    with torch.no_grad():
        chosen = choose_experts(scores, layer.correction_bias, shape)
    weights = scores * chosen
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), -1).to(x.dtype)
    gate, up, down = (weight.flatten(0, 1).to(x.dtype) for weight in (layer.gate, layer.up, layer.down))
    hidden = F.silu(h @ gate.T) * (h @ up.T)
    hidden = (hidden.unflatten(-1, (-1, shape.expert_size)) * weights[..., None]).flatten(-2)
    return x + hidden @ down, chosen.sum(0)


def head_loss(x: Tensor, head: "Head", weight: Tensor, targets: Tensor, kinds: Tensor, kind_weights: Tensor):
    """Weighted loss and, for reporting, the unweighted sums per kind.

    x [num_tokens, hidden]; targets, kinds [num_tokens] int64; kind_weights [NUM_KINDS] fp32
    Returns loss (scalar) and [2, NUM_KINDS]: summed nats, and counts.
    """
    h = rms_norm(x, head.norm, head.shape.norm_epsilon)
    nats = F.cross_entropy((h @ weight.to(x.dtype).T).float(), targets, reduction="none")
    weights = kind_weights[kinds]
    loss = (nats * weights).sum() / weights.sum()
    with torch.no_grad():
        one_hot = kinds[:, None] == torch.arange(NUM_KINDS, device=kinds.device)
        sums = torch.stack(((nats[:, None] * one_hot).sum(0), one_hot.sum(0).float()))
    return loss, sums


def draft_input(hidden: Tensor, embedded: Tensor, mtp: "MtpLayer", norm: Tensor) -> Tensor:
    """What the MTP layer sees: the next token's embedding first, then the trunk's normed output."""
    epsilon = mtp.layer.attention.shape.norm_epsilon
    hidden = rms_norm(hidden, norm, epsilon)
    pair = torch.cat((rms_norm(embedded, mtp.enorm, epsilon), rms_norm(hidden, mtp.hnorm, epsilon)), -1)
    return pair @ mtp.eh_proj.to(pair.dtype).T


def _matrix(*sizes: int, fan_in: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) * scale * fan_in**-0.5)


class Attention(nn.Module):
    """Weights of one MLA block, [out, in] as in the checkpoint."""

    def __init__(self, shape: ModelShape, residual_scale: float):
        super().__init__()
        self.shape = shape
        hidden, heads = shape.hidden_size, shape.num_heads
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.q_a = _matrix(shape.q_lora_rank, hidden, fan_in=hidden)
        self.q_a_norm = nn.Parameter(torch.ones(shape.q_lora_rank))
        self.q_b = _matrix(heads * shape.head_dim, shape.q_lora_rank, fan_in=shape.q_lora_rank)
        self.kv_a = _matrix(shape.kv_lora_rank + shape.rope_dim, hidden, fan_in=hidden)
        self.kv_a_norm = nn.Parameter(torch.ones(shape.kv_lora_rank))
        self.kv_b = _matrix(heads * (shape.nope_dim + shape.v_dim), shape.kv_lora_rank, fan_in=shape.kv_lora_rank)
        width = heads * shape.v_dim
        self.o = _matrix(hidden, width, fan_in=width, scale=residual_scale)


class DenseLayer(nn.Module):
    def __init__(self, shape: ModelShape, residual_scale: float):
        super().__init__()
        self.attention = Attention(shape, residual_scale)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate = _matrix(inner, hidden, fan_in=hidden)
        self.up = _matrix(inner, hidden, fan_in=hidden)
        self.down = _matrix(hidden, inner, fan_in=inner, scale=residual_scale)


class ExpertLayer(nn.Module):
    """Routed experts first, the shared one last; `down` is kept [expert, in, out] so that it flattens without a copy."""

    def __init__(self, shape: ModelShape, residual_scale: float):
        super().__init__()
        self.attention = Attention(shape, residual_scale)
        hidden, inner, count = shape.hidden_size, shape.expert_size, shape.num_experts + shape.num_shared_experts
        self.router = _matrix(shape.num_experts, hidden, fan_in=hidden)
        self.register_buffer("correction_bias", torch.zeros(shape.num_experts))
        self.gate = _matrix(count, inner, hidden, fan_in=hidden)
        self.up = _matrix(count, inner, hidden, fan_in=hidden)
        self.down = _matrix(count, inner, hidden, fan_in=inner, scale=residual_scale)


class Head(nn.Module):
    """The norm before the vocabulary projection; the projection itself belongs to the trunk."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))


class MtpLayer(nn.Module):
    """The next-token-but-one layer; it shares embedding and vocabulary projection with the trunk."""

    def __init__(self, shape: ModelShape, residual_scale: float):
        super().__init__()
        hidden = shape.hidden_size
        self.enorm = nn.Parameter(torch.ones(hidden))
        self.hnorm = nn.Parameter(torch.ones(hidden))
        self.eh_proj = _matrix(hidden, 2 * hidden, fan_in=2 * hidden)
        self.layer = ExpertLayer(shape, residual_scale)
        self.head = Head(shape)


@dataclass(frozen=True)
class Operations:
    """The flat functions, compiled or not."""

    before_attention: Callable
    dense_half: Callable
    expert_half: Callable
    head_loss: Callable
    draft_input: Callable

    @classmethod
    def make(cls, compiled: bool) -> "Operations":
        functions = (before_attention, dense_half, expert_half, head_loss, draft_input)
        if compiled:
            functions = tuple(torch.compile(function, fullgraph=True, dynamic=False) for function in functions)
        return cls(*functions)


class TinyModel(nn.Module):
    """Trunk and MTP layer.

    operations  `Operations.make(True)` needs the same number of tokens in every call
    """

    def __init__(self, shape: ModelShape, operations: Operations, dtype: torch.dtype):
        super().__init__()
        self.shape, self.operations, self.dtype = shape, operations, dtype
        scale = (2 * shape.num_layers) ** -0.5
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.05)
        self.projection = _matrix(shape.vocab_size, shape.hidden_size, fan_in=shape.hidden_size, scale=0.5)
        layers = [DenseLayer(shape, scale) for _ in range(shape.num_dense_layers)]
        layers += [ExpertLayer(shape, scale) for _ in range(shape.num_layers - shape.num_dense_layers)]
        self.layers = nn.ModuleList(layers)
        self.head = Head(shape)
        self.mtp = MtpLayer(shape, scale)
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def rope_tables(self, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows * length, rope_dim / 2] fp32, positions from 0 in every row."""
        if (length, rows) not in self._tables:
            powers = torch.arange(0, self.shape.rope_dim, 2, device=self.embedding.device) / self.shape.rope_dim
            angles = torch.arange(length, device=self.embedding.device)[:, None] / self.shape.rope_theta**powers
            self._tables[length, rows] = (angles.cos().repeat(rows, 1), angles.sin().repeat(rows, 1))
        return self._tables[length, rows]

    def run_layer(self, layer: nn.Module, x: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """One block over [num_tokens, hidden]; also tokens per expert, None for a dense layer."""
        rows = x.shape[0] // length
        query, key, value = self.operations.before_attention(x, layer.attention, *self.rope_tables(length, rows))
        heads = (t.view(rows, length, self.shape.num_heads, -1).transpose(1, 2) for t in (query, key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if x.is_cuda and x.dtype == torch.bfloat16 else nullcontext():
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(x.shape[0], -1)
        if isinstance(layer, DenseLayer):
            return self.operations.dense_half(x, mixed, layer), None
        return self.operations.expert_half(x, mixed, layer)

    def trunk(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """ids [rows, length] int64 -> residual stream before the final norm [rows * length, hidden], expert loads."""
        x = F.embedding(ids.flatten(), self.embedding).to(self.dtype)
        loads = []
        for layer in self.layers:
            x, load = self.run_layer(layer, x, ids.shape[1])
            if load is not None:
                loads.append(load)
        return x, loads

    def draft(self, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        """MTP stream [rows * length, hidden] and its expert load; next_ids [rows, length] follow the trunk's ids.

        Nothing of the trunk gets a gradient.
        """
        embedded = F.embedding(next_ids.flatten(), self.embedding.detach()).to(self.dtype)
        x = self.operations.draft_input(hidden, embedded, self.mtp, self.head.norm.detach())
        return self.run_layer(self.mtp.layer, x, next_ids.shape[1])

    def logits(self, x: Tensor, norm: Tensor) -> Tensor:
        """fp32 logits [num_tokens, vocab] of a stream before its final norm."""
        h = rms_norm(x, norm, self.shape.norm_epsilon)
        return (h @ self.projection.to(x.dtype).T).float()
