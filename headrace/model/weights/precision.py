"""The precision recipe: which number format each part of the weights is kept in, decided once at load.

bf16    a plain tensor                                [..., out, in]
fp8     kernels.formats.fp8.Fp8Weight, DeepSeek's 128 x 128 blocks
nvfp4   kernels.formats.nvfp4.Nvfp4Weight, ModelOpt's blocks of 16

A part is one or several matrices that share their input; their rows are joined before they get here. Router, norms,
embedding and head are no parts: they stay bf16 (the correction bias fp32). Where a size does not suit a format the part
falls back to bf16, and the table of the loaded model says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.formats import fp8, nvfp4
from kernels.formats.fp8 import Fp8Weight
from kernels.formats.nvfp4 import Nvfp4Weight

Weight = torch.Tensor | Fp8Weight | Nvfp4Weight

FORMATS = ("bf16", "fp8", "nvfp4")
PARTS = ("qkv_a", "q_b", "kv_b", "o_proj", "dense ffn", "shared experts", "experts")
RECIPES: Mapping[str, Mapping[str, str]] = {
    "bf16": dict.fromkeys(PARTS, "bf16"),
    "fp8": dict.fromkeys(PARTS, "fp8"),
    "nvfp4": dict.fromkeys(PARTS, "nvfp4") | {"qkv_a": "fp8", "q_b": "fp8", "kv_b": "fp8"},
}
"""weight_dtype -> part -> format. The small low-rank projections lose most by four bits and save least."""


def format_of(weight: Weight) -> str:
    if isinstance(weight, Fp8Weight):
        return "fp8"
    return "nvfp4" if isinstance(weight, Nvfp4Weight) else "bf16"


def shape_of(weight: Weight) -> tuple[int, ...]:
    """[..., out, in] in values, whatever the format."""
    if isinstance(weight, Nvfp4Weight):
        return (*weight.packed.shape[:-1], 2 * weight.packed.shape[-1])
    return tuple(weight.data.shape if isinstance(weight, Fp8Weight) else weight.shape)


def why_not(name: str, part: str, out: int, width: int) -> str | None:
    """None when a part of these sizes can be kept in the format, else one sentence.

    Activations are quantised by 128 columns, and tiles of the grouped products never cross a block of rows.
    """
    if name == "bf16":
        return None
    if width % fp8.GROUP:
        return f"{width} columns are no multiple of {fp8.GROUP}"
    if part == "experts" and out % fp8.GROUP:
        return f"{out} rows are no multiple of {fp8.GROUP}"
    return None


def converted(weight: Weight, wanted: str) -> Weight:
    """The weight in another format; nothing happens when it has it already. Widening to bf16 rounds once."""
    have = format_of(weight)
    if have == wanted:
        return weight.bfloat16() if wanted == "bf16" else weight
    if wanted == "bf16":
        return widened(weight).bfloat16()
    wide = weight if have == "bf16" else widened(weight)
    return fp8.quantise_weight(wide) if wanted == "fp8" else nvfp4.quantise(wide)


def widened(weight: Weight) -> torch.Tensor:
    """fp32 values."""
    if isinstance(weight, Fp8Weight):
        return fp8.dequantise_weight(weight)
    return nvfp4.dequantise(weight) if isinstance(weight, Nvfp4Weight) else weight.float()


def joined(weights: Sequence[Weight], wanted: str) -> Weight:
    """Matrices of one width, one below the other, in the wanted format.

    Parts that are in the wanted format already keep their codes. FP8 blocks join only where every matrix but the last
    ends with a whole block; else the values are quantised anew. NVFP4 matrices get the largest of their global scales,
    and block scales to match (exact when the global scales agree, as ModelOpt leaves them for fused projections).
    """
    if len(weights) == 1:
        return converted(weights[0], wanted)
    same = all(format_of(weight) == wanted for weight in weights)
    if wanted == "fp8" and same and blocks_join([shape_of(weight)[-2] for weight in weights]):
        return Fp8Weight(torch.cat([w.data for w in weights], -2), torch.cat([w.scale for w in weights], -2))
    if wanted == "nvfp4" and same:
        return _joined_nvfp4(weights)
    wide = torch.cat([w if format_of(w) == "bf16" else widened(w) for w in weights], -2)
    return converted(wide, wanted)


def blocks_join(rows: Sequence[int]) -> bool:
    """Whether FP8 matrices of so many rows can stand one below the other with their own scales."""
    return all(count % fp8.GROUP == 0 for count in rows[:-1])


def _joined_nvfp4(weights: Sequence[Nvfp4Weight]) -> Nvfp4Weight:
    largest = torch.stack([weight.global_scale for weight in weights]).amax(0)
    scales = [
        (weight.block_scale.float() * (weight.global_scale / largest)[..., None, None]).to(weight.block_scale.dtype)
        for weight in weights
    ]
    inputs = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return Nvfp4Weight(
        torch.cat([weight.packed for weight in weights], -2),
        torch.cat(scales, -2),
        largest,
        torch.stack(inputs).amax(0) if inputs else None,
    )


def alike(experts: Weight, one: Weight) -> bool:
    """Whether a weight could be one more of these [e, out, in]: same format, same sizes."""
    return format_of(experts) == format_of(one) and shape_of(experts)[1:] == shape_of(one)


def appended(experts: Weight, one: Weight) -> Weight:
    """[e, out, in] and one more -> [e + 1, out, in]; they are `alike`."""
    if isinstance(experts, torch.Tensor):
        return torch.cat((experts, one[None]))
    parts = [
        None if few is None or more is None else torch.cat((few, more[None]) if few.dim() else (few[None], more[None]))
        for few, more in zip(experts, one, strict=True)
    ]
    if isinstance(experts, Nvfp4Weight) and parts[3] is not None:
        parts[3] = parts[3].amax()  # of the activations: the largest serves all
    return type(experts)(*parts)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights of one shape and one format under a new leading dimension (the experts)."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(weights))
    if isinstance(first, Fp8Weight):
        return Fp8Weight(torch.stack([w.data for w in weights]), torch.stack([w.scale for w in weights]))
    inputs = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return Nvfp4Weight(
        torch.stack([weight.packed for weight in weights]),
        torch.stack([weight.block_scale for weight in weights]),
        torch.stack([weight.global_scale for weight in weights]),
        torch.stack(inputs).amax() if inputs else None,
    )
