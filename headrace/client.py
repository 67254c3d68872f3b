"""Typed clients of the services: the only users of the generated stubs.

`AsyncClient` and `Client` are what people use; `DecodeClient`, `PrefillClient`, `KvStoreClient` and `RouterClient` are how
services and tools talk to each other. Every method takes seconds, returns plain values and raises headrace.errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from headrace import protocol as p
from headrace import rpc, wire
from headrace.errors import HeadraceError, Unavailable
from headrace.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

if TYPE_CHECKING:
    from headrace.transfer.grpc import RowChunk


class DecodeClient:
    """One decode rank, as routers and prefill ranks call it."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)

    async def reserve(self, command: p.ReserveCommand, timeout_s: float) -> p.Reservation:
        """Room for one attempt. Raises Overloaded, InvalidRequest, StaleEpoch, StaleAttempt, Unavailable."""
        answer = await rpc.call_unary(self._stub.Reserve, wire.reserve_to_pb(command), timeout_s)
        return wire.reservation_from_pb(answer.reservation)

    async def renew(self, reservation_id: str, writer_epoch: str, timeout_s: float) -> float:
        """Seconds until the reservation now expires. Raises StaleAttempt once it has ended."""
        request = decode_pb2.RenewRequest(reservation_id=reservation_id, writer_epoch=writer_epoch)
        answer = await rpc.call_unary(self._stub.Renew, request, timeout_s)
        return wire.duration_from_pb(answer.expires_in)

    async def commit(self, command: p.CommitCommand, timeout_s: float) -> float:
        """Seconds decode took to check and accept. Raises ManifestMismatch, StaleAttempt, StaleEpoch."""
        answer = await rpc.call_unary(self._stub.Commit, wire.commit_to_pb(command), timeout_s)
        return wire.duration_from_pb(answer.commit_duration)

    async def release(
        self, request_id: str, attempt: int, decode_epoch: str, sample_indices: Sequence[int], timeout_s: float
    ) -> None:
        """Ends attempts up to `attempt`; empty `sample_indices` ends all samples."""
        request = decode_pb2.ReleaseRequest(
            request_id=request_id, attempt=attempt, decode_epoch=decode_epoch, sample_indices=sample_indices
        )
        await rpc.call_unary(self._stub.Release, request, timeout_s)

    async def stream_tokens(
        self, router: p.WorkerIdentity, decode_epoch: str, resume_after_frame: int = 0
    ) -> AsyncIterator[p.TokenFrame]:
        """Frames for one router, without an end of its own. Close the iterator to leave."""
        request = decode_pb2.StreamTokensRequest(
            router=wire.identity_to_pb(router), decode_epoch=decode_epoch, resume_after_frame=resume_after_frame
        )
        async with contextlib.aclosing(rpc.call_stream(self._stub.StreamTokens, request, None)) as messages:
            async for message in messages:
                yield wire.frame_from_pb(message)

    async def info(self, timeout_s: float = 5.0) -> p.WorkerInfo:
        """What the rank says of itself."""
        answer = await rpc.call_unary(self._stub.GetDecodeInfo, decode_pb2.GetDecodeInfoRequest(), timeout_s)
        return wire.worker_info_from_pb(answer.info)

    async def ledger(self, timeout_s: float = 5.0) -> p.DecodeLedger:
        """Who holds what."""
        answer = await rpc.call_unary(self._stub.GetDecodeLedger, decode_pb2.GetDecodeLedgerRequest(), timeout_s)
        return wire.decode_ledger_from_pb(answer)


class RowSender:
    """Carries rows to decode ranks for the `grpc` transfer, blocking; called from a transfer thread."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> RowSender:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def __call__(self, address: str, chunks: Iterable[RowChunk]) -> int:
        """Bytes written at `address`. Raises headrace.errors."""
        if address not in self._channels:
            self._channels[address] = rpc.open_blocking_channel(address)
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels[address])
        requests = (
            decode_pb2.WriteRowsRequest(
                session=chunk.session, layer=chunk.layer, target_row=chunk.target_row, payload=chunk.payload
            )
            for chunk in chunks
        )
        try:
            return stub.WriteRows(requests, timeout=self._timeout_s).byte_count
        except grpc.RpcError as error:
            raise rpc.error_from_rpc(error) from error


class PrefillClient:
    """One prefill rank, as routers and decode ranks call it."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def prefill(self, command: p.PrefillCommand, timeout_s: float) -> AsyncIterator[p.PrefillEvent]:
        """Events of one attempt. Closing the iterator cancels it."""
        request = wire.prefill_to_pb(command)
        async with contextlib.aclosing(rpc.call_stream(self._stub.Prefill, request, timeout_s)) as messages:
            async for message in messages:
                yield wire.prefill_event_from_pb(message)

    async def stop(self, reservation_id: str, writer_epoch: str, wait_s: float, timeout_s: float) -> p.StopState:
        """Ends every write of a reservation; says whether late writes are impossible."""
        request = prefill_pb2.StopRequest(
            reservation_id=reservation_id, writer_epoch=writer_epoch, wait=wire.duration_to_pb(wait_s)
        )
        answer = await rpc.call_unary(self._stub.Stop, request, timeout_s)
        return p.StopState.DRAINED if answer.state == prefill_pb2.STOP_STATE_DRAINED else p.StopState.UNKNOWN

    async def info(self, timeout_s: float = 5.0) -> p.WorkerInfo:
        """What the rank says of itself."""
        answer = await rpc.call_unary(self._stub.GetPrefillInfo, prefill_pb2.GetPrefillInfoRequest(), timeout_s)
        return wire.worker_info_from_pb(answer.info)

    async def ledger(self, timeout_s: float = 5.0) -> p.PrefillLedger:
        """Who holds what."""
        answer = await rpc.call_unary(self._stub.GetPrefillLedger, prefill_pb2.GetPrefillLedgerRequest(), timeout_s)
        return wire.prefill_ledger_from_pb(answer)


class KvStoreClient:
    """The block catalogue."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)

    async def lookup(self, keys: Sequence[str], timeout_s: float) -> tuple[p.PrefixHolder, ...]:
        """Who holds how many leading blocks of `keys`, longest first."""
        request = kvstore_pb2.LookupRequest(keys=keys)
        return wire.holders_from_pb(await rpc.call_unary(self._stub.Lookup, request, timeout_s))

    async def publish(self, worker: p.WorkerIdentity, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        """Registers blocks a worker holds."""
        request = kvstore_pb2.PublishRequest(
            worker=wire.identity_to_pb(worker), keys=keys, time_to_live=wire.duration_to_pb(ttl_s)
        )
        await rpc.call_unary(self._stub.Publish, request, timeout_s)

    async def withdraw(self, worker: p.WorkerIdentity, keys: Sequence[str], timeout_s: float) -> None:
        """Takes blocks out; empty `keys` takes out all of that epoch."""
        request = kvstore_pb2.WithdrawRequest(worker=wire.identity_to_pb(worker), keys=keys)
        await rpc.call_unary(self._stub.Withdraw, request, timeout_s)

    async def acquire(
        self, holder: p.WorkerIdentity, keys: Sequence[str], ttl_s: float, timeout_s: float
    ) -> tuple[str, int]:
        """A lease id and how many leading keys it pins."""
        request = kvstore_pb2.AcquireRequest(
            holder=wire.identity_to_pb(holder), keys=keys, time_to_live=wire.duration_to_pb(ttl_s)
        )
        answer = await rpc.call_unary(self._stub.Acquire, request, timeout_s)
        return answer.lease_id, answer.key_count

    async def release_lease(self, lease_id: str, timeout_s: float) -> None:
        """Ends a lease early."""
        await rpc.call_unary(self._stub.ReleaseLease, kvstore_pb2.ReleaseLeaseRequest(lease_id=lease_id), timeout_s)

    async def watch(self) -> AsyncIterator[tuple[str, p.WorkerIdentity, tuple[str, ...]]]:
        """(`PUBLISHED` | `WITHDRAWN` | `LOST`, worker, keys) as they happen."""
        request = kvstore_pb2.WatchRequest()
        async with contextlib.aclosing(rpc.call_stream(self._stub.Watch, request, None)) as messages:
            async for message in messages:
                change = kvstore_pb2.CatalogueChange.Name(message.change).removeprefix("CATALOGUE_CHANGE_")
                yield change, wire.identity_from_pb(message.worker), tuple(message.keys)


class RouterClient:
    """The operator's view of a router."""

    def __init__(self, channel: grpc.aio.Channel):
        self._stub = router_pb2_grpc.RouterServiceStub(channel)

    async def workers(self, timeout_s: float = 5.0) -> tuple[p.WorkerView, ...]:
        """Every worker it knows."""
        answer = await rpc.call_unary(self._stub.ListWorkers, router_pb2.ListWorkersRequest(), timeout_s)
        return tuple(wire.worker_view_from_pb(view) for view in answer.workers)

    async def ledger(self, timeout_s: float = 5.0) -> p.RouterLedger:
        """Requests in flight."""
        answer = await rpc.call_unary(self._stub.GetRouterLedger, router_pb2.GetRouterLedgerRequest(), timeout_s)
        return wire.router_ledger_from_pb(answer)


class Peers:
    """Channels to other processes, one per address, kept until `close`."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened at first use."""
        if address not in self._channels:
            self._channels[address] = rpc.open_channel(address)
        return self._channels[address]

    def decode(self, address: str) -> DecodeClient:
        """A decode rank."""
        return DecodeClient(self.channel(address))

    def prefill(self, address: str) -> PrefillClient:
        """A prefill rank."""
        return PrefillClient(self.channel(address))

    def kvstore(self, address: str) -> KvStoreClient:
        """A kvstore process."""
        return KvStoreClient(self.channel(address))

    async def forget(self, address: str) -> None:
        """Closes the channel to an address that is gone."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all channels."""
        for address in list(self._channels):
            await self.forget(address)


# --- the public clients ----------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One sample of a whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[p.TokenLogprob] = field(default_factory=list)
    finish_reason: p.FinishReason = p.FinishReason.NONE
    matched_stop: str = ""

    def add(self, delta: p.SampleDelta) -> None:
        """Appends what a message brought."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not p.FinishReason.NONE:
            self.finish_reason = delta.finish_reason
            self.matched_stop = delta.matched_stop


@dataclass
class Answer:
    """A whole answer: its samples in order and the final summary."""

    request_id: str = ""
    samples: list[Sample] = field(default_factory=list)
    final: p.FinalSummary | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text if self.samples else ""

    def add(self, event: p.GenerateEvent) -> None:
        """Appends what a message brought."""
        self.request_id = event.request_id
        for delta in event.deltas:
            while len(self.samples) <= delta.sample_index:
                self.samples.append(Sample())
            self.samples[delta.sample_index].add(delta)
        self.final = event.final or self.final


def _command(prompt: str | Sequence[int] | Sequence[p.ChatMessage], options: dict[str, object]) -> p.GenerateCommand:
    own = {
        name: options.pop(name)
        for name in ("request_id", "stream_interval", "final_only", "cache_salt", "priority")
        if name in options
    }
    if isinstance(prompt, str):
        form: dict[str, object] = {"text": prompt}
    elif prompt and isinstance(prompt[0], p.ChatMessage):
        form = {"chat": tuple(prompt)}
    else:
        form = {"token_ids": tuple(prompt)}
    return p.GenerateCommand(**form, **own, sampling=options)  # type: ignore[arg-type]


class AsyncClient:
    """An asyncio client of a router.

        async with AsyncClient("127.0.0.1:20600") as client:
            async for event in client.stream("Once upon a time", max_tokens=64):
                print(event.deltas[0].text if event.deltas else "", end="")

    Options are the fields of SamplingParams plus request_id, stream_interval, final_only, cache_salt, priority.
    """

    def __init__(self, address: str, *, timeout_s: float = 120.0):
        self._address = address
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> AsyncClient:
        self._channel = rpc.open_channel(self._address, own_connection=True)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; open streams end with an error, never a hang."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        if self._channel is None:
            raise Unavailable("the client is closed: use it inside `async with`")
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def stream(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> AsyncIterator[p.GenerateEvent]:
        """Messages of the answer as they come. Raises headrace.errors; closing the iterator cancels the request."""
        request = wire.generate_to_pb(_command(prompt, options))
        stream = rpc.call_stream(self._stub.Generate, request, timeout_s or self._timeout_s)
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                yield wire.generate_event_from_pb(message)

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer."""
        answer = Answer()
        async with contextlib.aclosing(self.stream(prompt, timeout_s=timeout_s, **options)) as events:
            async for event in events:
                answer.add(event)
        return answer

    async def model(self) -> p.ModelInfo:
        """What is served and its limits."""
        answer = await rpc.call_unary(self._stub.GetModel, inference_pb2.GetModelRequest(), self._timeout_s)
        return wire.model_from_pb(answer)


class Client:
    """The same for synchronous code: `with Client(address) as client: print(client.generate("Hello").text)`."""

    def __init__(self, address: str, *, timeout_s: float = 120.0):
        self._timeout_s = timeout_s
        self._channel = rpc.open_blocking_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Iterator[p.GenerateEvent]:
        """Messages of the answer as they come; leaving the loop cancels the request."""
        request = wire.generate_to_pb(_command(prompt, options))
        call = self._stub.Generate(request, timeout=timeout_s or self._timeout_s, metadata=rpc.call_metadata())
        try:
            for message in call:
                yield wire.generate_event_from_pb(message)
        except grpc.RpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            call.cancel()

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[p.ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer."""
        answer = Answer()
        for event in self.stream(prompt, timeout_s=timeout_s, **options):
            answer.add(event)
        return answer

    def model(self) -> p.ModelInfo:
        """What is served and its limits."""
        try:
            return wire.model_from_pb(self._stub.GetModel(inference_pb2.GetModelRequest(), timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise rpc.error_from_rpc(error) from error


__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "DecodeClient",
    "HeadraceError",
    "KvStoreClient",
    "Peers",
    "PrefillClient",
    "RouterClient",
    "Sample",
]
