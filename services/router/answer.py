"""The answer under construction: token ids per sample become text, deltas and an end.

Tokens come in by position and are final from then on: every later attempt gets them as input. A sample ends here by the
same rules as in the engines (end token, stop token, length) and by stop strings, which only the router sees. What follows
the end is ignored. A run of tokens that cannot hold an end is taken at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.common import FinishReason, SamplingParams
from headrace.protocol.inference import SampleDelta, TokenLogprob
from headrace.text.stream import TextStream, TokenBytes

Top = Sequence[tuple[tuple[int, float], ...]]


class _Sample:
    """One sample: every id so far, how many of them were sent, and the text in between."""

    __slots__ = ("ids", "sent", "text", "logprobs", "reason", "closed")

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str]):
        self.ids: list[int] = []
        self.sent = 0
        self.text = TextStream(tokenizer, stop)
        self.logprobs: list[TokenLogprob] = []
        self.reason = FinishReason.NONE
        self.closed = False


class AnswerBuilder:
    """All samples of one request. `interval` is tokens per delta after the first; `final_only` gives all at the end."""

    def __init__(self, tokenizer: TokenBytes, sampling: SamplingParams, interval: int, final_only: bool = False):
        self._samples = [_Sample(tokenizer, sampling.stop) for _ in range(sampling.n)]
        self._eos = frozenset(() if sampling.ignore_eos else sampling.eos_token_ids)
        self._stop_ids = self._eos | frozenset(sampling.stop_token_ids)
        self._max_tokens = sampling.max_tokens
        self._wants_logprobs = sampling.logprobs is not None
        self._interval = interval
        self._final_only = final_only
        self._running = sampling.n
        self._num_tokens = 0
        self.cut_samples: list[int] = []
        """Samples that a stop string ended, in that order: workers do not know until they are told."""

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return self._running == 0

    def count(self, sample_index: int) -> int:
        """Tokens of one sample so far, which is also the output position of its next token."""
        return len(self._samples[sample_index].ids)

    def ids(self, sample_index: int) -> tuple[int, ...]:
        """Tokens of one sample so far."""
        return tuple(self._samples[sample_index].ids)

    def is_running(self, sample_index: int) -> bool:
        """Whether the sample exists and has not ended."""
        return 0 <= sample_index < len(self._samples) and not self._samples[sample_index].reason

    def running(self) -> tuple[int, ...]:
        """Samples that have not ended."""
        return tuple(index for index, sample in enumerate(self._samples) if not sample.reason)

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self._samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self._num_tokens

    def push(
        self, sample_index: int, token_ids: Sequence[int], logprobs: Sequence[float] | None = None, top: Top = ()
    ) -> None:
        """Appends the next tokens of a running sample; `logprobs` and `top` run in parallel to them."""
        sample = self._samples[sample_index]
        before = len(sample.ids)
        if sample.text.is_plain and before + len(token_ids) < self._max_tokens and self._stop_ids.isdisjoint(token_ids):
            sample.ids.extend(token_ids)
            sample.text.push_run(token_ids)
        else:
            self._push_each(sample_index, sample, token_ids)
        self._num_tokens += len(sample.ids) - before
        if self._wants_logprobs and logprobs is not None:
            for index, token in enumerate(sample.ids[before:]):
                sample.logprobs.append(TokenLogprob(token, logprobs[index], tuple(top[index]) if top else ()))

    def _push_each(self, sample_index: int, sample: _Sample, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            sample.ids.append(token)
            if token in self._stop_ids:
                self._close(sample, FinishReason.EOS if token in self._eos else FinishReason.STOP)
            elif sample.text.push(token):
                self.cut_samples.append(sample_index)
                self._close(sample, FinishReason.STOP)
            elif len(sample.ids) >= self._max_tokens:
                self._close(sample, FinishReason.LENGTH)
            if sample.reason:
                return

    def end(self, sample_index: int, reason: FinishReason) -> None:
        """A worker says that the sample is over. What ended it here first stays."""
        self._close(self._samples[sample_index], reason)

    def take(self) -> tuple[SampleDelta, ...]:
        """Deltas that are due now."""
        if self._final_only and self._running:
            return ()
        samples = self._samples
        if len(samples) == 1:
            return (self._delta(0, samples[0]),) if self._is_due(samples[0]) else ()
        return tuple([self._delta(index, sample) for index, sample in enumerate(samples) if self._is_due(sample)])

    def _is_due(self, sample: _Sample) -> bool:
        if sample.reason:
            return not sample.closed
        sent = sample.sent
        unsent = len(sample.ids) - sent
        return unsent >= self._interval or (unsent > 0 and sent == 0)

    def _delta(self, index: int, sample: _Sample) -> SampleDelta:
        ids, first = sample.ids, sample.sent
        sample.sent = len(ids)
        if not sample.reason and not sample.logprobs:
            return SampleDelta(index, first, tuple(ids[first:]), sample.text.take())
        ended = sample.closed = bool(sample.reason)
        text = sample.text.finish() if ended else sample.text.take()
        logprobs = tuple(sample.logprobs)
        sample.logprobs.clear()
        matched = (sample.text.matched_stop or "") if ended else ""
        return SampleDelta(index, first, tuple(ids[first:]), text, logprobs, sample.reason, matched)

    def _close(self, sample: _Sample, reason: FinishReason) -> None:
        if not sample.reason:
            sample.reason = reason
            self._running -= 1
