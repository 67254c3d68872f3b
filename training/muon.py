"""Muon: momentum whose matrix update is made orthogonal by a few Newton-Schulz steps (Jordan et al., 2024)."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: singular values end near 1. [count, rows, columns] -> bf16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Updates matrices in place, batched by shape; a [experts, rows, columns] parameter is `experts` matrices.

    transposed  parameters kept [in, out]: their update is scaled as that of the [out, in] matrix they stand for
    """

    def __init__(self, parameters: Iterable[nn.Parameter], transposed: set[nn.Parameter], momentum: float):
        self._momentum = momentum
        self._groups: dict[tuple, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            rows, columns = parameter.shape[-2:]
            out, into = (columns, rows) if parameter in transposed else (rows, columns)
            self._groups[(rows, columns, max(1.0, out / into) ** 0.5)].append(parameter)
        self._buffers: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """One update: p <- p (1 - rate * decay) - rate * scale * orthogonalised Nesterov momentum."""
        for group, parameters in self._groups.items():
            rows, columns, scale = group
            gradients = torch.cat([parameter.grad.view(-1, rows, columns) for parameter in parameters])
            buffer = self._buffers.setdefault(group, torch.zeros_like(gradients))
            buffer.lerp_(gradients, 1 - self._momentum)
            updates = orthogonalise(gradients.lerp(buffer, self._momentum))
            sizes = [parameter.numel() // (rows * columns) for parameter in parameters]
            pieces = [piece.view_as(p).to(p.dtype) for piece, p in zip(updates.split(sizes), parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 - rate * decay)
            torch._foreach_add_(parameters, pieces, alpha=-rate * scale)

    def drop_gradients(self) -> None:
        for parameters in self._groups.values():
            for parameter in parameters:
                parameter.grad = None
