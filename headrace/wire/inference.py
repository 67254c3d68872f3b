"""protobuf <-> our values: `inference.proto`."""

from __future__ import annotations

from headrace.protocol import inference as p
from headrace.v1 import inference_pb2
from headrace.wire.common import (
    add_stages,
    duration_from_pb,
    finish_reason_from_pb,
    sampling_given,
    sampling_given_to_pb,
    set_duration,
    stages_from_pb,
    usage_from_pb,
    usage_to_pb,
)


def generate_to_pb(value: p.GenerateCommand) -> inference_pb2.GenerateRequest:
    """A public request."""
    message = inference_pb2.GenerateRequest(
        sampling=sampling_given_to_pb(value.sampling),
        request_id=value.request_id,
        stream_interval=value.stream_interval,
        final_only=value.final_only,
        cache_salt=value.cache_salt,
        priority=value.priority,
    )
    if value.text is not None:
        message.text = value.text
    if value.chat is not None:
        message.chat.SetInParent()
        message.chat.messages.extend(inference_pb2.ChatMessage(role=x.role, content=x.content) for x in value.chat)
    if value.token_ids is not None:
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(value.token_ids)
    return message


def generate_from_pb(message: inference_pb2.GenerateRequest) -> p.GenerateCommand:
    """A public request; limits are the router's business."""
    kind = message.WhichOneof("prompt")
    turns = tuple(p.ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
    return p.GenerateCommand(
        text=message.text if kind == "text" else None,
        chat=turns if kind == "chat" else None,
        token_ids=tuple(message.tokens.token_ids) if kind == "tokens" else None,
        sampling=sampling_given(message.sampling),
        request_id=message.request_id,
        stream_interval=message.stream_interval,
        final_only=message.final_only,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def _token_logprob_to_pb(value: p.TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in value.top]
    return inference_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def _add_delta(message: inference_pb2.GenerateResponse, value: p.SampleDelta) -> None:
    """One delta. Made for every token of the public stream: what is not set in most of them is not touched."""
    delta = message.deltas.add(
        sample_index=value.sample_index,
        first_position=value.first_position,
        token_ids=value.token_ids,
        text=value.text,
    )
    if value.logprobs:
        delta.logprobs.extend([_token_logprob_to_pb(entry) for entry in value.logprobs])
    if value.finish_reason:
        delta.finish_reason = int(value.finish_reason)  # type: ignore[assignment]
    if value.matched_stop:
        delta.matched_stop = value.matched_stop


def _delta_from_pb(message: inference_pb2.SampleDelta) -> p.SampleDelta:
    return p.SampleDelta(
        sample_index=message.sample_index,
        first_position=message.first_position,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(
            p.TokenLogprob(x.token_id, x.logprob, tuple((top.token_id, top.logprob) for top in x.top))
            for x in message.logprobs
        ),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        matched_stop=message.matched_stop,
    )


def _set_final(message: inference_pb2.FinalSummary, value: p.FinalSummary) -> None:
    message.usage.CopyFrom(usage_to_pb(value.usage))
    add_stages(message.stages, value.stages)
    message.seed, message.trace_id = value.seed, value.trace_id
    set_duration(message.time_to_first_token, value.time_to_first_token_s)
    set_duration(message.duration, value.duration_s)


def generate_event_to_pb(value: p.GenerateEvent) -> inference_pb2.GenerateResponse:
    """A part of an answer."""
    message = inference_pb2.GenerateResponse(request_id=value.request_id)
    for delta in value.deltas:
        _add_delta(message, delta)
    if value.final is not None:
        _set_final(message.final, value.final)
    return message


def generate_event_from_pb(message: inference_pb2.GenerateResponse) -> p.GenerateEvent:
    """A part of an answer."""
    final = None
    if message.HasField("final"):
        final = p.FinalSummary(
            usage=usage_from_pb(message.final.usage),
            stages=stages_from_pb(message.final.stages),
            seed=message.final.seed,
            trace_id=message.final.trace_id,
            time_to_first_token_s=duration_from_pb(message.final.time_to_first_token),
            duration_s=duration_from_pb(message.final.duration),
        )
    deltas = tuple(_delta_from_pb(delta) for delta in message.deltas)
    return p.GenerateEvent(message.request_id, deltas, final)


def model_to_pb(value: p.ModelInfo) -> inference_pb2.GetModelResponse:
    """The model and its limits."""
    return inference_pb2.GetModelResponse(
        model=value.model,
        max_context_tokens=value.max_context_tokens,
        vocabulary_size=value.vocabulary_size,
        default_sampling=sampling_given_to_pb(value.default_sampling),
        has_chat_template=value.has_chat_template,
    )


def model_from_pb(message: inference_pb2.GetModelResponse) -> p.ModelInfo:
    """The model and its limits."""
    return p.ModelInfo(
        model=message.model,
        max_context_tokens=message.max_context_tokens,
        vocabulary_size=message.vocabulary_size,
        default_sampling=sampling_given(message.default_sampling),
        has_chat_template=message.has_chat_template,
    )
