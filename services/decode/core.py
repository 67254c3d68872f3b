"""One decode rank's decisions: who gets room, which commits are right, when blocks come back.

Everything here runs on the event loop; checksums and row copies run in one worker thread. Commands come over links (`links.py`) and
are answered by calling `answer`, once. Waiting for room is `admission.py`'s business, commits are `commit.py`'s, ends `ending.py`'s,
late writes `quarantine.py`'s, tokens `outputs.py`'s and `tokens.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.clock import within
from headrace.config import DecodeConfig
from headrace.errors import HeadraceError, Unavailable
from headrace.protocol.common import WorkerIdentity, WorkerInfo, WorkerProgress
from headrace.protocol.decode import CommitCommand, DecodeLedger, ReleaseCommand, ReserveCommand
from services.decode.admission import Admission
from services.decode.background import Background
from services.decode.commit import Commits
from services.decode.ending import Endings
from services.decode.interfaces import Collaborators, TokenLink
from services.decode.outputs import Outputs
from services.decode.quarantine import Quarantine
from services.decode.request import Answer, Requests
from services.decode.reservation import PROMISED, ReservationTable, State
from services.decode.reserve import Reserves
from services.decode.timekeeper import Timekeeper
from services.decode.tokens import TokenLinks


class Decoder:
    """The core of a decode rank. Use `async with Decoder.open(...) as core`."""

    def __init__(
        self,
        config: DecodeConfig,
        info: WorkerInfo,
        collaborators: Collaborators,
        background: Background,
        *,
        stop_wait_s: float,
        output_chunk: int,
    ):
        self._info, self._background = info, background
        self._clock, self._pool, self._engine = collaborators.clock, collaborators.pool, collaborators.engine
        expiry_s, silence_s = config.reserve_expiry_s, config.quarantine_max_s
        self._table, self._requests = ReservationTable(expiry_s, expiry_s + silence_s), Requests()
        self._tokens = TokenLinks(config.request_credit_bytes, lambda *lost: self._endings.lose_named(*lost))
        self._outputs = Outputs(self._clock, self._tokens, output_chunk)
        self._quarantine = Quarantine(
            collaborators,
            background,
            silence_s=silence_s,
            stop_wait_s=stop_wait_s,
            on_fenced=lambda: self._admission.admit(),
        )
        self._admission = Admission(
            info,
            collaborators,
            self._table,
            self._quarantine,
            max_waiting=config.max_waiting_requests,
            expiry_s=expiry_s,
        )
        self._endings = Endings(
            collaborators,
            self._table,
            self._requests,
            self._admission,
            self._outputs,
            self._quarantine,
            background,
            on_settled=lambda: self._timekeeper.settled(),
        )
        self._admission.on_refused = self._endings.forget
        self._outputs.connect(self._endings)
        self._timekeeper = Timekeeper(
            self._clock, self._pool, self._table, self._endings, self._admission, self._quarantine
        )
        self._reserves = Reserves(
            collaborators,
            self._table,
            self._requests,
            self._tokens,
            self._admission,
            self._endings,
            self._timekeeper,
            background,
        )
        self._commits = Commits(
            info, collaborators, self._table, self._requests, self._outputs, self._endings, background
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: DecodeConfig,
        info: WorkerInfo,
        collaborators: Collaborators,
        *,
        stop_wait_s: float = 6.0,
        output_chunk: int = 128,
    ) -> AsyncIterator[Decoder]:
        """A decoder that lives as long as the block.

        stop_wait_s   how long a writer may take to end its running writes; above the transfer time-out
        output_chunk  sampled tokens handled between two looks at the event loop
        """
        async with asyncio.TaskGroup() as tasks:
            background = Background(tasks)
            core = cls(config, info, collaborators, background, stop_wait_s=stop_wait_s, output_chunk=output_chunk)
            collaborators.engine.connect(core._outputs.on_step, core._outputs.on_failure)
            background.spawn(core._timekeeper.run)
            background.spawn(core._outputs.run)
            try:
                yield core
            finally:
                core._stop()

    # --- routers -----------------------------------------------------------------------------------------------------

    def reserve(self, router: WorkerIdentity, command: ReserveCommand, answer: Answer) -> None:
        """Answers a Reservation: at once, or when there is room, within the command's time. A repeated command gets the first
        answer. Raises or answers InvalidRequest for what can never fit, Overloaded, Unavailable, StaleAttempt."""
        self._reserves.reserve(router, command, answer)

    def release(self, router: WorkerIdentity, command: ReleaseCommand) -> None:
        """Ends attempts of that router, or some of their samples. Safe to repeat. Blocks come back when nobody can touch them."""
        self._endings.release(router, command)

    def token_link_opened(self, link: TokenLink) -> None:
        """A router's token link is connected, for the first time or again."""
        if self._tokens.open(link):
            self._endings.router_lost(link.peer.epoch, Unavailable("the router opened another token link"))

    def token_link_lost(self, link: TokenLink, error: HeadraceError) -> None:
        """It will not come back: everything of that router ends."""
        if self._tokens.lose(link):
            self._endings.router_lost(link.peer.epoch, error)

    def router_lost(self, router: WorkerIdentity, error: HeadraceError) -> None:
        """Its commands cannot be answered any more: everything of that router ends."""
        self._endings.router_lost(router.epoch, error)

    # --- writers -----------------------------------------------------------------------------------------------------

    def begin(self, reservation_id: str, writer_epoch: str) -> float:
        """The writer is about to write; seconds until the reservation now expires. Once. Raises StaleAttempt, StaleEpoch."""
        return self._table.begin(reservation_id, writer_epoch, self._clock.now())

    def renew(self, reservation_id: str, writer_epoch: str) -> float:
        """Seconds until the reservation now expires. Raises StaleAttempt, StaleEpoch."""
        return self._table.renew(reservation_id, writer_epoch, self._clock.now())

    def commit(self, command: CommitCommand, writer_epoch: str, answer: Answer) -> None:
        """Answers CommitAccepted; see `Commits.commit`."""
        self._commits.commit(writer_epoch, command, answer)

    # --- how it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        """Identity, layout and limits."""
        return self._info

    def progress(self) -> WorkerProgress:
        """Load and progress, for every beat. There is none while the engine warms up: nothing is served before."""
        blocks, steps = self._pool.ledger(), self._engine.steps
        return WorkerProgress(
            serving=not self._reserves.is_closed,
            completed_steps=steps,
            completed_layers=steps * self._info.layout.layer_count,
            pending_steps=self._engine.pending,
            pause_reason="FENCING" if self._quarantine.is_fencing else "",
            queued_requests=len(self._admission),
            queued_tokens=self._admission.waiting_tokens,
            running_requests=self._table.count(State.COMMITTED, State.RUNNING),
            available_blocks=blocks.free + blocks.cached,
        )

    def ledger(self) -> DecodeLedger:
        """Who holds what now."""
        return DecodeLedger(
            blocks=self._pool.ledger(),
            waiting_requests=self._table.count(State.WAITING),
            reserved_requests=self._table.count(*PROMISED),
            running_requests=self._table.count(State.COMMITTED, State.RUNNING),
            quarantined_requests=self._table.count(State.QUARANTINED),
            steps=self._engine.steps,
            fences=self._quarantine.generation,
            open_links=self._tokens.num_open,
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, honours promises, lets what runs finish, at most `grace_s`; what is left is handed back."""
        draining = Unavailable("this decode rank is draining", reason="DRAINING")
        self._reserves.close(draining)
        try:
            with contextlib.suppress(TimeoutError):
                await within(self._clock, grace_s, self._wait_unfinished())
        finally:  # also when the caller's own patience ends first
            for request in self._requests.unfinished():
                self._endings.lose(request, "DRAINING", draining)

    async def _wait_unfinished(self) -> None:
        while self._requests.unfinished():
            await self._timekeeper.wait_settled()

    def _stop(self) -> None:
        stopped = Unavailable("this decode rank has stopped", reason="DRAINING")
        self._reserves.close(stopped)
        for request in self._requests.unfinished():
            self._outputs.report_loss(request, "DRAINING")
        self._background.cancel()
        self._commits.close()
