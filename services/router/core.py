"""The router core: accepts requests, keeps the ledger, drains.

What happens to one request stands in `request.py`, to one attempt in `attempt.py`; who is there in `fleet.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace.clock import Clock, within
from headrace.config import RouterConfig
from headrace.errors import AlreadyExists, Unavailable
from headrace.protocol.inference import GenerateCommand, GenerateEvent, ModelInfo
from headrace.protocol.router import RouterLedger, WorkerView
from services.router import limits, survey
from services.router.admission import AdmissionQueue
from services.router.canary import Canaries
from services.router.checkpoint import CheckpointInfo
from services.router.fleet import Fleet
from services.router.interfaces import Claims, Dialer, Membership
from services.router.placing import Placing
from services.router.probing import Probing
from services.router.request import Request, RouterParts

RELEASE_TIMEOUT_S = 2.0
"""How long a router that stops waits for its last releases to arrive."""


class Router:
    """One router process. Use `async with Router.open(...) as router`."""

    def __init__(self, parts: RouterParts, tasks: asyncio.TaskGroup):
        self._parts, self._tasks = parts, tasks
        self._requests: dict[str, Request] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: RouterConfig,
        checkpoint: CheckpointInfo,
        *,
        membership: Membership,
        dialer: Dialer,
        clock: Clock,
        claims: Claims | None = None,
    ) -> AsyncIterator[Router]:
        """A router with its links to all ranks, and the tasks that keep them. Leaving ends them all."""
        async with asyncio.TaskGroup() as tasks:
            admission, handles = AdmissionQueue(config.max_queue_tokens, clock), itertools.count(1)
            fleet = Fleet(membership, dialer, clock, tasks, admission.pump)
            placing = Placing(fleet, admission.pump)
            canaries = Canaries(checkpoint, clock, fleet, placing, handles)
            probing = Probing(fleet, clock, canaries.run if config.canary else None)
            router = cls(RouterParts(config, checkpoint, clock, fleet, placing, admission, handles, claims), tasks)
            keeping = tasks.create_task(probing.run())
            try:
                yield router
            finally:
                router._end_all()
                keeping.cancel()
                await asyncio.wait((keeping,))  # its canaries release what they hold
                await fleet.close(RELEASE_TIMEOUT_S)

    # --- what others ask ---------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a pair of workers has proven itself and new requests are taken."""
        return self._parts.fleet.has_pair.is_set() and not self._draining

    async def wait_ready(self, ready: bool) -> None:
        """Until there is a ready pair, or until there is none."""
        await (self._parts.fleet.has_pair if ready else self._parts.fleet.no_pair).wait()

    def model(self) -> ModelInfo:
        """What is served here."""
        return self._parts.checkpoint.info()

    def workers(self) -> tuple[WorkerView, ...]:
        """Every known worker, ready or not."""
        return survey.views(self._parts.fleet.ranks())

    def ledger(self) -> RouterLedger:
        """Requests in flight by state."""
        admission = self._parts.admission
        return RouterLedger(
            queued_requests=admission.queued_requests,
            queued_tokens=admission.queued_tokens,
            running_requests=len(self._requests) - admission.queued_requests,
            open_handles=sum(rank.links.tokens.open_handles for rank in self._parts.fleet.decodes()),
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and waits for the running ones, at most `grace_s`; what then still runs is cancelled."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await within(self._parts.clock, grace_s, self._idle.wait())
        self._end_all()

    # --- one request ---------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        command: GenerateCommand,
        time_left_s: float,
        on_accepted: Callable[[str], Awaitable[None]] | None = None,
        trace_parent: str = "",
    ) -> AsyncIterator[GenerateEvent]:
        """The messages of one answer; the last has `final`. Closing the iterator cancels the request.

        `on_accepted(request_id)` is awaited before anything else happens. Raises InvalidRequest, AlreadyExists, Overloaded,
        Unavailable, DeadlineExceeded, or what ended the last attempt.
        """
        request = self._accept(command, time_left_s, trace_parent)
        try:
            if on_accepted is not None:
                await on_accepted(request.display_id)
            await request.begin()
            while (event := await request.outbox.next()) is not None:
                yield event
        finally:
            request.cancel()

    def _accept(self, command: GenerateCommand, time_left_s: float, trace_parent: str) -> Request:
        if self._draining:
            raise Unavailable("this router is draining", reason="DRAINING")
        if command.request_id:
            limits.check_request_id(command.request_id)
        request_id = command.request_id or secrets.token_hex(16)
        if request_id in self._requests:
            raise AlreadyExists(f"request {request_id} is running", field="request_id")
        request = Request(self._parts, command, request_id, time_left_s, trace_parent, self._forget)
        self._requests[request_id] = request
        self._idle.clear()
        return request

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.display_id, None)
        if request.claimed and self._parts.claims is not None:
            self._tasks.create_task(self._parts.claims.unclaim(request.claimed))
        if not self._requests:
            self._idle.set()

    def _end_all(self) -> None:
        """Cancels what runs; the releases of its legs are on their way."""
        for request in list(self._requests.values()):
            request.cancel()
