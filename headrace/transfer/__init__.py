"""The factory of transfer back ends; see `base` for what they promise.

`open_source` and `open_target` load a back end only when it is asked for: the router and the kvstore never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.transfer.base import RowRun, TargetDescriptor, TransferSource, TransferTarget, is_drained, plan_runs
from headrace.transfer.mooncake import mooncake_environment, why_not_mooncake

if TYPE_CHECKING:
    import torch

    from headrace.transfer.grpc import Send

__all__ = [
    "RowRun",
    "TargetDescriptor",
    "TransferSource",
    "TransferTarget",
    "is_drained",
    "mooncake_environment",
    "open_source",
    "open_target",
    "plan_runs",
    "why_not_mooncake",
]

BACKENDS = ("mooncake", "local", "grpc")


def open_source(
    backend: str, pool: torch.Tensor, host: str, *, timeout_s: float = 5.0, send: Send | None = None
) -> TransferSource:
    """The writing side over `pool [num_layers, num_blocks, block_size, row_dim]`, which must outlive it.

    host       name or address of this host as peers reach it (mooncake)
    timeout_s  one push at most (mooncake)
    send       carries chunks to a decode service (grpc)
    Raises ConfigError for an unknown back end, one that cannot run here, or a missing `send`.
    """
    if backend == "mooncake":
        from headrace.transfer.mooncake import MooncakeSource

        return MooncakeSource(pool, host, timeout_s=timeout_s)
    if backend == "local":
        from headrace.transfer.local import LocalSource

        return LocalSource(pool)
    if backend == "grpc":
        from headrace.transfer.grpc import GrpcSource

        if send is None:
            raise ConfigError("the grpc transfer needs a function that sends", field="transfer.backend")
        return GrpcSource(pool, send)
    raise _unknown(backend)


def open_target(backend: str, pool: torch.Tensor, host: str) -> TransferTarget:
    """The written side over `pool [num_layers, num_blocks, block_size, row_dim]`, which must outlive it.

    host   as peers reach it; for `grpc` the `host:port` of this rank's DecodeService
    Raises ConfigError for an unknown back end or one that cannot run here.
    """
    if backend == "mooncake":
        from headrace.transfer.mooncake import MooncakeTarget

        return MooncakeTarget(pool, host)
    if backend == "local":
        from headrace.transfer.local import LocalTarget

        return LocalTarget(pool)
    if backend == "grpc":
        from headrace.transfer.grpc import GrpcTarget

        return GrpcTarget(pool, host)
    raise _unknown(backend)


def _unknown(backend: str) -> ConfigError:
    return ConfigError(f"transfer.backend is one of {', '.join(BACKENDS)}, not {backend!r}", field="transfer.backend")
