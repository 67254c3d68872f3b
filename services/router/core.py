"""The router core: one request from acceptance to its final message.

accept an id -> check -> tokenise -> wait for admission -> route -> attempts until every sample has ended -> final message.
A request runs in a task of the router's own; the caller reads its messages from a bounded outbox. Whoever ends it (the last
token, a stop string, an error, the caller's cancel, the deadline) ends in the same place: the attempt's `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.clock import Clock, Deadline, first_of, within
from headrace.config import RouterConfig
from headrace.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleAttempt,
    Unavailable,
    unwrap,
)
from headrace.observe import logs, telemetry
from headrace.observe.context import request_id_var
from headrace.protocol import (
    FinalSummary,
    GenerateCommand,
    GenerateEvent,
    ModelInfo,
    RouterLedger,
    SamplingParams,
    Usage,
    WorkerIdentity,
    WorkerView,
)
from services.router import limits
from services.router.admission import Admission
from services.router.answer import Answer, Outbox
from services.router.attempts import Attempt, LegError, RequestState
from services.router.checkpoint import Checkpoint
from services.router.interfaces import Dialer, Membership
from services.router.prefix import NoPrefixes, PrefixIndex
from services.router.stages import StageLog
from services.router.workers import (
    CANARY_TIMEOUT_S,
    DecodeWorker,
    Need,
    Place,
    PrefillWorker,
    Workers,
)

log = logs.get(__name__)

START_WAIT_S = 2.0
"""How long a new request waits for a ready pair of workers while there has never been one."""
RESTART_WAIT_S = 15.0
"""The same once there has been one: a rank that restarts is back within that."""
RETRY_WAIT_S = 60.0
"""How long a request that was running waits for workers to come back, within its deadline."""
LONG_TEXT_CHARACTERS = 2_000
"""Longer text is tokenised in a thread: it would hold up the loop."""
QUIET_INTERVAL = 16
"""Tokens per frame when nobody reads along and no stop string is looked for."""
_POLL_S = 0.05
_CANARY_IDS = (0, 1, 2, 3, 4, 5, 6, 7)


class Claims(Protocol):
    """Names taken across all routers of the mesh: headrace.process.registry.Registry."""

    @property
    def reachable(self) -> bool: ...

    async def claim(self, name: str, ttl_s: float) -> bool: ...

    async def unclaim(self, name: str) -> None: ...


@dataclass(eq=False)
class _Run:
    """One running request: what came in, what goes out, how far it is."""

    command: GenerateCommand
    request_id: str
    deadline: Deadline
    stages: StageLog
    outbox: Outbox
    answer: Answer | None = None
    first_token_s: float | None = None
    is_queued: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def publish(self) -> None:
        """Sends what is due."""
        assert self.answer is not None
        if self.first_token_s is None and self.answer.num_tokens:
            self.first_token_s = self.stages.elapsed_s()
        if not self.command.final_only and (deltas := self.answer.take()):
            self.outbox.put(GenerateEvent(self.request_id, deltas))


class Router:
    """One router process. Use `async with Router.open(...) as router`."""

    def __init__(
        self,
        config: RouterConfig,
        checkpoint: Checkpoint,
        identity: WorkerIdentity,
        clock: Clock,
        prefixes: PrefixIndex,
        claims: Claims | None,
        tasks: asyncio.TaskGroup,
    ):
        self._config, self._checkpoint, self._identity, self._clock = config, checkpoint, identity, clock
        self._prefixes, self._claims, self._tasks = prefixes, claims, tasks
        self._handles = itertools.count(1)
        self._runs: dict[str, _Run] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._admission: Admission[Place] = Admission(config.max_queue_tokens, clock)
        self._workers: Workers

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: RouterConfig,
        checkpoint: Checkpoint,
        identity: WorkerIdentity,
        *,
        membership: Membership,
        dialer: Dialer,
        clock: Clock,
        prefixes: PrefixIndex | None = None,
        claims: Claims | None = None,
    ) -> AsyncIterator[Router]:
        """A router with its tasks: the view of the workers, their token streams, the requests. Leaving ends them all."""
        async with asyncio.TaskGroup() as tasks:
            router = cls(config, checkpoint, identity, clock, prefixes or NoPrefixes(), claims, tasks)
            router._workers = Workers(
                membership,
                dialer,
                identity,
                clock,
                router._canary if config.canary else None,
                router._admission.pump,
            )
            keeping = tasks.create_task(router._workers.run())
            try:
                yield router
            finally:
                await router._end_all()
                keeping.cancel()

    # --- what others ask ---------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a pair of workers has proven itself and new requests are taken."""
        return self._workers.has_pair.is_set() and not self._draining

    async def wait_ready(self, ready: bool) -> None:
        """Until there is a ready pair, or until there is none."""
        await (self._workers.has_pair if ready else self._workers.no_pair).wait()

    def model(self) -> ModelInfo:
        """What is served here."""
        return self._checkpoint.info()

    def workers(self) -> tuple[WorkerView, ...]:
        """Every known worker, ready or not."""
        return self._workers.views()

    def ledger(self) -> RouterLedger:
        """Requests in flight by state."""
        queued = self._admission.queued_requests
        return RouterLedger(
            queued_requests=queued,
            queued_tokens=self._admission.queued_tokens,
            running_requests=len(self._runs) - queued,
            open_handles=sum(worker.stream.open_handles for worker in self._workers.decodes()),
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and waits for the running ones, at most `grace_s`; what then still runs is cancelled."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await within(self._clock, grace_s, self._idle.wait())
        await self._end_all()

    # --- one request ---------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        command: GenerateCommand,
        time_left_s: float,
        on_accepted: Callable[[str], Awaitable[None]] | None = None,
    ) -> AsyncIterator[GenerateEvent]:
        """The messages of one answer; the last has `final`. Closing the iterator cancels the request.

        `on_accepted(request_id)` is awaited before anything else happens. Raises InvalidRequest, AlreadyExists, Overloaded,
        Unavailable, DeadlineExceeded, or what ended the last attempt.
        """
        run = self._accept(command, time_left_s)
        try:
            if on_accepted is not None:
                await on_accepted(run.request_id)
            run.task = self._tasks.create_task(self._supervise(run))
            async with contextlib.aclosing(run.outbox.read()) as events:
                async for event in events:
                    yield event
        finally:
            if run.task is None:
                self._forget(run)
            else:
                run.task.cancel()

    def _accept(self, command: GenerateCommand, time_left_s: float) -> _Run:
        if self._draining:
            raise Unavailable("this router is draining", reason="DRAINING")
        if command.request_id:
            limits.check_request_id(command.request_id)
        request_id = command.request_id or secrets.token_hex(16)
        if request_id in self._runs:
            raise AlreadyExists(f"request {request_id} is running", field="request_id")
        deadline = Deadline.after(self._clock, min(time_left_s, self._config.max_deadline_s))
        run = _Run(command, request_id, deadline, StageLog(self._clock), Outbox(self._config.reader_buffer_messages))
        self._runs[request_id] = run
        self._idle.clear()
        return run

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run.request_id, None)
        if not self._runs:
            self._idle.set()

    async def _supervise(self, run: _Run) -> None:
        """The request's task: its errors go to the reader, never to the router's task group."""
        request_id_var.set(run.request_id)
        error: BaseException | None = None
        try:
            with telemetry.span("router.generate", request_id=run.request_id) as span:
                await self._within_deadline(run, span)
        except asyncio.CancelledError:
            error = Cancelled("the request was cancelled")
            raise
        except BaseException as failure:
            error = unwrap(failure)
        finally:
            run.outbox.close(_typed(error))
            self._record(run, error)
            self._forget(run)

    async def _within_deadline(self, run: _Run, span: telemetry.OpenSpan) -> None:
        if await first_of(self._serve_claimed(run, span), self._clock.wait(run.deadline.left_s())):
            raise DeadlineExceeded(f"the deadline passed after {run.stages.elapsed_s():.3f} s")

    async def _serve_claimed(self, run: _Run, span: telemetry.OpenSpan) -> None:
        """A client's own id is claimed across all routers while the request runs; nobody waits for a Redis that is away."""
        name = f"request/{run.request_id}"
        if not run.command.request_id or self._claims is None or not self._claims.reachable:
            await self._serve(run, span)
            return
        if not await self._claims.claim(name, run.deadline.left_s() + 1.0):
            raise AlreadyExists(f"request {run.request_id} is running on another router", field="request_id")
        try:
            await self._serve(run, span)
        finally:
            self._tasks.create_task(self._claims.unclaim(name))

    async def _serve(self, run: _Run, span: telemetry.OpenSpan) -> None:
        state = await self._prepare(run)
        place = await self._admit(run, state)
        place = await self._route(run, state, place)
        await self._run_attempts(state, place)
        self._finish(run, state, span)

    # --- before any worker hears of it -----------------------------------------------------------------------------------------

    async def _prepare(self, run: _Run) -> RequestState:
        command, checkpoint = run.command, self._checkpoint
        limits.check_shape(command, checkpoint)
        with run.stages.span("router.tokenize") as span:
            ids = await self._token_ids(command)
            span.set(tokens=len(ids))
        field_name = limits.prompt_field(command)
        limits.check_prompt_length(len(ids), field_name, checkpoint.max_context_tokens)
        sampling = limits.resolve_sampling(
            command.sampling,
            checkpoint,
            len(ids),
            checkpoint.max_context_tokens,
            self._config.default_max_tokens,
            lambda: secrets.randbits(63),
        )
        if command.final_only:
            limits.check_final_only(sampling)
        await self._wait_pair(run)
        limits.check_capacity(sampling, len(ids), field_name, self._workers.capacity())
        return self._state(run, ids, sampling)

    async def _token_ids(self, command: GenerateCommand) -> tuple[int, ...]:
        if command.token_ids is not None:
            return command.token_ids
        text = command.text if command.text is not None else self._render(command)
        if len(text) <= LONG_TEXT_CHARACTERS:
            return tuple(self._checkpoint.tokenizer.encode(text))
        return tuple(await asyncio.to_thread(self._checkpoint.tokenizer.encode, text))

    def _render(self, command: GenerateCommand) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in command.chat or ()]
        try:
            text = self._checkpoint.chat.render(messages)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, reason=error.reason, field="chat.messages") from error
        limits.check_text_size(text, "chat", self._checkpoint)
        return text

    async def _wait_pair(self, run: _Run) -> None:
        """Gives up a little before the deadline, so that the client is told what was missing."""
        wait_s = RESTART_WAIT_S if self._workers.had_pair else START_WAIT_S
        if not self._workers.has_pair.is_set():
            with contextlib.suppress(TimeoutError):
                wait_s = min(wait_s, 0.9 * run.deadline.left_s())
                await within(self._clock, wait_s, self._workers.has_pair.wait())
        if not self._workers.has_pair.is_set():
            raise self._workers.unavailable()

    def _state(self, run: _Run, ids: tuple[int, ...], sampling: SamplingParams) -> RequestState:
        command = run.command
        interval = max(self._config.stream_interval, command.stream_interval)
        if command.final_only and not sampling.stop:
            interval = max(interval, QUIET_INTERVAL)
        run.answer = Answer(self._checkpoint.tokenizer, sampling, interval, command.final_only)
        return RequestState(
            # A client may use an id again; workers remember ended attempts by it for a while.
            leg_id=f"{run.request_id}~{secrets.token_hex(4)}" if command.request_id else run.request_id,
            prompt=ids,
            sampling=sampling,
            stream_interval=interval,
            cache_salt=command.cache_salt,
            answer=run.answer,
            deadline=run.deadline,
            stages=run.stages,
            publish=run.publish,
        )

    # --- admission and routing ---------------------------------------------------------------------------------------------------

    async def _admit(self, run: _Run, state: RequestState) -> Place:
        need, ahead = _need(state), self._config.reserve_ahead_tokens
        with run.stages.span("router.queue", tokens=len(state.prompt)):
            return await self._admission.wait_admission(
                len(state.prompt),
                run.command.priority,
                lambda: self._workers.choose(need, reserve_ahead_tokens=ahead),
            )

    async def _route(self, run: _Run, state: RequestState, place: Place) -> Place:
        """Moves to the rank that holds most of the prompt, when that is cheaper and has room."""
        try:
            with run.stages.span("router.route", tokens=len(state.prompt)) as span:
                holders = await self._prefixes.lookup(state.cache_salt, state.prompt, self._workers.block_size())
                if holders:
                    place = self._choose_again(state, place, holders)
                span.set(
                    prefill=place.prefill.identity.address,
                    decode=place.decode.identity.address if place.decode is not None else None,
                    cached_tokens=max((x.num_blocks for x in holders), default=0) * self._workers.block_size(),
                )
                return place
        except BaseException:
            place.release()
            raise

    def _choose_again(self, state: RequestState, place: Place, holders) -> Place:
        place.release()
        ahead = self._config.reserve_ahead_tokens
        better = self._workers.choose(
            _need(state), reserve_ahead_tokens=ahead, holders=holders, keep=place.decode
        ) or self._workers.choose(_need(state), holders=holders)
        if better is None:
            raise self._workers.unavailable()
        return better

    # --- attempts ------------------------------------------------------------------------------------------------------------------

    async def _run_attempts(self, state: RequestState, place: Place) -> None:
        """Until the answer is complete. Every attempt continues by position: delivered tokens are its input."""
        avoid: frozenset[WorkerIdentity] = frozenset()
        while True:
            state.attempts += 1
            try:
                await self._attempt(state, place)
            except LegError as lost:
                if state.answer.finished:
                    return
                self._blame(place, lost)
                if not self._may_retry(state, place, lost):
                    raise lost.error from lost
                avoid |= _identities(place, lost)
                keep = None if lost.decode and not lost.prefill else place.decode
            else:
                self._workers.succeeded(place.prefill, place.decode)
                return
            place = await self._next_place(state, avoid, keep)

    async def _attempt(self, state: RequestState, place: Place) -> None:
        attempt = Attempt(
            state,
            place.prefill,
            place.decode,
            handle=next(self._handles),
            router=self._identity,
            clock=self._clock,
            tasks=self._tasks,
            on_prefilled=place.prefilled,
        )
        try:
            await attempt.run()
        finally:
            place.release()

    def _blame(self, place: Place, lost: LegError) -> None:
        """Breakers count transport errors and workers' faults only."""
        error = lost.error
        telemetry.counter("headrace.router.lost_attempts").add(1, reason=error.reason)
        if isinstance(error, InvalidRequest | Overloaded | StaleAttempt) or error.reason == "NO_TOKEN_STREAM":
            return
        log.warning("attempt lost", reason=error.reason, detail=error.message)
        if lost.prefill:
            self._workers.suspect(place.prefill, error)
        if lost.decode and place.decode is not None:
            self._workers.suspect(place.decode, error)

    def _may_retry(self, state: RequestState, place: Place, lost: LegError) -> bool:
        error = lost.error
        if state.attempts >= self._config.max_attempts or error.reason == "READER_STALLED":
            return False
        if isinstance(error, Overloaded) and not state.answer.num_tokens:
            worker = place.decode if lost.decode else place.prefill
            return worker is not None and self._workers.has_other(worker)
        return error.retryable or isinstance(error, Cancelled | DeadlineExceeded | InternalError)

    async def _next_place(
        self, state: RequestState, avoid: frozenset[WorkerIdentity], keep: DecodeWorker | None
    ) -> Place:
        """Somewhere else if there is such a place; else the same, once it has been probed or has come back."""
        until = Deadline.after(self._clock, min(RETRY_WAIT_S, state.deadline.left_s()))
        await self._clock.wait(min(1.0, _POLL_S * 2 ** (state.attempts - 1)))
        while True:
            place = self._workers.choose(_need(state), avoid=avoid, keep=keep)
            if place is not None:
                return place
            if until.left_s() <= 0:
                raise self._workers.unavailable()
            await self._clock.wait(_POLL_S)

    # --- the end ---------------------------------------------------------------------------------------------------------------------

    def _finish(self, run: _Run, state: RequestState, span: telemetry.OpenSpan) -> None:
        answer, stages = state.answer, run.stages
        if run.first_token_s is not None:
            stages.emit("router.stream", run.first_token_s, telemetry.traceparent(), answer.num_tokens)
        duration_s = stages.elapsed_s()
        stages.add("router.generate", 0.0, duration_s, answer.num_tokens)
        usage = Usage(
            prompt_tokens=len(state.prompt),
            cached_tokens=state.cached_tokens,
            computed_tokens=len(state.prompt) - state.cached_tokens,
            generated_tokens=answer.num_tokens,
            attempts=state.attempts,
        )
        final = FinalSummary(
            usage,
            stages.in_order(),
            state.sampling.seed,
            telemetry.trace_id(telemetry.traceparent()),
            run.first_token_s or duration_s,
            duration_s,
        )
        span.set(tokens=usage.prompt_tokens, generated_tokens=usage.generated_tokens, attempts=state.attempts)
        run.outbox.put(GenerateEvent(run.request_id, answer.take(), final))

    def _record(self, run: _Run, error: BaseException | None) -> None:
        """The GenAI metrics of one request."""
        attributes = dict(telemetry.GENAI_ATTRIBUTES) | {"gen_ai.request.model": self._checkpoint.name}
        duration_s = run.stages.elapsed_s()
        failed = {"error.type": getattr(error, "reason", type(error).__name__)} if error is not None else {}
        telemetry.histogram(*telemetry.REQUEST_DURATION).record(duration_s, **attributes, **failed)
        if error is not None or run.first_token_s is None or run.answer is None:
            return
        telemetry.histogram(*telemetry.TIME_TO_FIRST_TOKEN).record(run.first_token_s, **attributes)
        gaps = run.answer.num_tokens / run.answer.num_samples - 1
        if gaps > 0:
            per_token_s = (duration_s - run.first_token_s) / gaps
            telemetry.histogram(*telemetry.TIME_PER_OUTPUT_TOKEN).record(per_token_s, **attributes)

    async def _end_all(self) -> None:
        """Cancels what runs and lets the releases of its legs go out."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- readiness -------------------------------------------------------------------------------------------------------------------

    async def _canary(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        """Two tokens through this pair: the first from prefill, the second from decode. Raises what went wrong."""
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        answer = Answer(self._checkpoint.tokenizer, sampling, 1, final_only=True)
        state = RequestState(
            leg_id=f"canary-{secrets.token_hex(8)}",
            prompt=tuple(token % self._checkpoint.vocabulary_size for token in _CANARY_IDS),
            sampling=sampling,
            stream_interval=1,
            cache_salt="canary",
            answer=answer,
            deadline=Deadline.after(self._clock, CANARY_TIMEOUT_S),
            stages=StageLog(self._clock),
            publish=lambda: None,
            attempts=1,
        )
        place = Place(prefill, decode, len(state.prompt), 1, self._admission.pump).book()
        try:
            with telemetry.span("router.canary", parent=""):
                await self._canary_attempt(state, place)
        except HeadraceError:
            raise
        except Exception as error:
            raise _typed(unwrap(error)) or InternalError(str(error)) from error

    async def _canary_attempt(self, state: RequestState, place: Place) -> None:
        await first_of(self._blamed_attempt(state, place), self._clock.wait(CANARY_TIMEOUT_S))
        if state.answer.num_tokens != 2:
            raise Unavailable(f"the canary brought {state.answer.num_tokens} of 2 tokens", reason="CANARY_FAILED")

    async def _blamed_attempt(self, state: RequestState, place: Place) -> None:
        try:
            await self._attempt(state, place)
        except LegError as lost:
            self._blame(place, lost)
            raise lost.error from lost


def _need(state: RequestState) -> Need:
    delivered = max((state.answer.count(sample) for sample in state.answer.running()), default=0)
    prompt, sampling = len(state.prompt), state.sampling
    return Need(
        num_tokens=prompt + delivered,
        total_tokens=prompt + sampling.max_tokens,
        blocks=lambda size: limits.decode_blocks(prompt, sampling.max_tokens, sampling.n, size),
        decode=state.needs_decode,
    )


def _identities(place: Place, lost: LegError) -> frozenset[WorkerIdentity]:
    """Whom the next attempt should avoid: the one leg that is surely to blame, prefill when both may be."""
    if lost.prefill:
        return frozenset({place.prefill.identity})
    return frozenset({place.decode.identity}) if lost.decode and place.decode is not None else frozenset()


def _typed(error: BaseException | None) -> HeadraceError | None:
    """What the reader is told: our own errors as they are, anything else as a fault of ours, logged once."""
    if error is None or isinstance(error, HeadraceError):
        return error
    log.error("unexpected error in a request", error=error)
    return InternalError(f"unexpected {type(error).__name__}; the router's log has the rest")
