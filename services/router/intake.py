"""What one attempt's ranks say of their samples, put into the answer: by position, nothing twice, no gap."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import Unavailable
from headrace.observe import telemetry
from headrace.protocol.common import FinishReason, Stage
from headrace.protocol.decode import SampleEnd, TokenRecord
from headrace.protocol.prefill import FirstTokens
from services.router.answer import AnswerBuilder

_tokens_after_end = telemetry.counter("headrace.router.tokens_after_end")
_repeated_tokens = telemetry.counter("headrace.router.repeated_tokens")


class TokenIntake:
    """Of one attempt. Methods that take tokens raise Unavailable when decode lost the sample, or tokens are missing (TOKEN_GAP)."""

    def __init__(self, answer: AnswerBuilder, with_logprobs: bool):
        self._answer, self._with_logprobs = answer, with_logprobs
        self.samples = answer.running()
        self.open_ends = set(self.samples)
        """Samples that decode may still say something of."""
        self.ended_some = False
        """Whether decode has ended any sample by itself."""
        self.decode_stages: Sequence[Stage] = ()
        self._num_before = answer.num_tokens
        self._told_cut = len(answer.cut_samples)
        self._early: list[TokenRecord | SampleEnd] | None = []

    @property
    def num_new(self) -> int:
        """Tokens this attempt has brought."""
        return self._answer.num_tokens - self._num_before

    @property
    def was_cut_here(self) -> bool:
        """Whether a stop string ended a sample in this attempt, so that decode would go on with it."""
        return bool(self._answer.cut_samples) and not self.open_ends.isdisjoint(self._answer.cut_samples)

    def first_tokens(self, event: FirstTokens) -> None:
        """What prefill sampled; then what decode said before that was known here."""
        for token in event.tokens:
            logprobs, top = ((token.logprob,), (token.top,)) if self._with_logprobs else (None, ())
            self._push(token.sample_index, token.position, (token.token_id,), logprobs, top)
            if token.finish_reason:  # decode never hears of this sample, so no end will come from there
                if self._answer.is_running(token.sample_index):
                    self._answer.end(token.sample_index, token.finish_reason)
                self.open_ends.discard(token.sample_index)
        early, self._early = self._early or [], None
        for item in early:
            self.end(item) if isinstance(item, SampleEnd) else self.record(item)

    def record(self, record: TokenRecord) -> None:
        """Tokens of one sample from decode. They may overtake prefill's first tokens: then they wait for those."""
        if self._early is None:
            self._push(record.sample_index, record.first_position, record.token_ids, record.logprobs, record.top)
        else:
            self._early.append(record)

    def end(self, end: SampleEnd) -> None:
        """Decode ends a sample, and says how many tokens it has."""
        if self._early is not None:
            self._early.append(end)
            return
        sample, answer = end.sample_index, self._answer
        if answer.is_running(sample):
            if end.error_reason or end.finish_reason in (FinishReason.NONE, FinishReason.CANCELLED):
                reason = end.error_reason or "CANCELLED_BY_DECODE"
                raise Unavailable(f"decode gave sample {sample} up", reason=reason)
            if end.output_tokens > answer.count(sample):
                text = f"sample {sample} ended with {end.output_tokens} tokens, {answer.count(sample)} came"
                raise Unavailable(text, reason="TOKEN_GAP")
            answer.end(sample, end.finish_reason)
        self.open_ends.discard(sample)
        self.ended_some = True
        self.decode_stages = end.stages or self.decode_stages

    def take_cut(self) -> Sequence[int]:
        """Samples that a stop string has ended since this was last asked; decode must be told."""
        if len(self._answer.cut_samples) == self._told_cut:
            return ()
        cut = self._answer.cut_samples[self._told_cut :]
        self._told_cut += len(cut)
        self.open_ends.difference_update(cut)
        return cut

    def _push(self, sample: int, first: int, ids: Sequence[int], logprobs: Sequence[float] | None, top) -> None:
        answer = self._answer
        if not answer.is_running(sample):
            _tokens_after_end.add(len(ids))
            return
        seen = answer.count(sample) - first
        if seen:
            if seen < 0:
                text = f"sample {sample}: position {first} follows {answer.count(sample)}"
                raise Unavailable(text, reason="TOKEN_GAP")
            _repeated_tokens.add(min(seen, len(ids)))
            ids, logprobs, top = ids[seen:], logprobs and logprobs[seen:], top[seen:]
        answer.push(sample, ids, logprobs, top)
