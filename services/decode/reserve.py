"""Reserve: a command becomes a request that waits for room."""

from __future__ import annotations

import itertools

from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.observe.record import Record
from headrace.process.faults import Fault
from headrace.protocol.common import WorkerIdentity
from headrace.protocol.decode import ReserveCommand
from services.decode.admission import Admission
from services.decode.background import Background
from services.decode.ending import Endings
from services.decode.interfaces import Collaborators
from services.decode.request import Answer, Request, Requests
from services.decode.reservation import ReservationTable
from services.decode.timekeeper import Timekeeper
from services.decode.tokens import TokenLinks

ANSWER_MARGIN_S = 0.3
"""Kept of the time a router has left, so that "no room" arrives as such and not as a deadline: three ticks of the timekeeper."""


class Reserves:
    """Takes Reserve commands until it is closed."""

    def __init__(
        self,
        collaborators: Collaborators,
        table: ReservationTable,
        requests: Requests,
        tokens: TokenLinks,
        admission: Admission,
        endings: Endings,
        timekeeper: Timekeeper,
        background: Background,
    ):
        self._clock, self._faults, self._background = collaborators.clock, collaborators.faults, background
        self._table, self._requests, self._tokens = table, requests, tokens
        self._admission, self._endings, self._timekeeper = admission, endings, timekeeper
        self._engine_handles = itertools.count(1)
        self._closed: HeadraceError | None = None

    @property
    def is_closed(self) -> bool:
        """Nothing new is taken any more."""
        return self._closed is not None

    def close(self, error: HeadraceError) -> None:
        """Refuses what waits and what comes from now on."""
        self._closed = error
        self._admission.close(error)

    def reserve(self, router: WorkerIdentity, command: ReserveCommand, answer: Answer) -> None:
        """See `Decoder.reserve`."""
        fault = self._faults.fire("decode.reserve", attempt=command.attempt, request_id=command.request_id)
        if fault is None:
            self._reserve(router, command, answer)
        else:
            self._background.spawn(self._reserve_with_fault, fault, router, command, answer)

    def _reserve(self, router: WorkerIdentity, command: ReserveCommand, answer: Answer) -> None:
        plan = self._admission.plan(command)
        if not self._tokens.is_open(router.epoch):
            raise Unavailable("this router epoch has no open token link", reason="NO_TOKEN_LINK")
        first = self._table.find((router.epoch, command.request_id), command.attempt)
        if first is not None:
            self._answer_again(self._requests.of(first), answer)
            return
        self._check_new(router, command)
        now = self._clock.now()
        record, superseded = self._table.open(router, command, now)
        wait_until = now + max(0.0, command.time_left_s - ANSWER_MARGIN_S)
        trace = Record(command.trace_parent, root=None)
        request = Request(record, plan, now, wait_until, next(self._engine_handles), trace, [answer])
        self._requests.add(request)
        self._admission.enqueue(request)
        self._endings.supersede(superseded, command.attempt)
        self._timekeeper.watch()
        self._admission.admit()

    def _answer_again(self, request: Request, answer: Answer) -> None:
        if request.promise is not None:
            answer(request.promise)
        else:
            request.answers.append(answer)

    def _check_new(self, router: WorkerIdentity, command: ReserveCommand) -> None:
        if self._closed is not None:
            raise self._closed
        if self._requests.named(router.epoch, command.handle) is not None:
            raise InvalidRequest(f"handle: {command.handle} names another attempt of this router", field="handle")
        self._admission.check_bound((router.epoch, command.request_id))

    async def _reserve_with_fault(
        self, fault: Fault, router: WorkerIdentity, command: ReserveCommand, answer: Answer
    ) -> None:
        """Fault injection: refuses, or reserves later."""
        try:
            if fault.kind != "delay":
                raise Unavailable("fault injected at decode.reserve", reason="FAULT_INJECTED")
            await self._clock.wait(fault.seconds)
            self._reserve(router, command, answer)
        except HeadraceError as error:
            answer(error)
