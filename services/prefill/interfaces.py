"""What the prefill core needs of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from headrace.engine.request import PrefillJob
from headrace.protocol.common import WorkerIdentity
from services.prefill.leg import Leg


class Batcher(Protocol):
    """Runs whole prompts (headrace.engine.prefill.PrefillBatcher); thread-safe. A mock engine stands here in benches."""

    queued_tokens: int
    batches: int
    completed_layers: int
    pending_batches: int

    def add(self, job: PrefillJob) -> None: ...

    def cancel(self, key: str) -> bool: ...


class Pusher(Protocol):
    """Writes layers (services.prefill.pusher.Pusher); thread-safe."""

    def push_layer(self, leg: Leg, layer: int, ready: Callable[[], None]) -> None: ...

    def push_again(self, leg: Leg) -> None: ...


class Writer(Protocol):
    """A link to one decode rank, as one of its legs uses it (services.prefill.writers.Writer)."""

    def ask(self, body: object, within_s: float) -> asyncio.Future[Any]:
        """The last answer. Ends with a HeadraceError; with Unavailable, of whatever reason, when the rank is silent or gone."""
        ...

    def leave(self, leg: Leg) -> None:
        """The leg needs it no more. Safe to repeat."""
        ...


class Writers(Protocol):
    """The way to decode ranks (services.prefill.writers.Writers)."""

    def enter(self, leg: Leg, decode: WorkerIdentity) -> Writer: ...
