"""What one request tells of itself when it has ended: the final summary, the metrics, the spans of its own stages."""

from __future__ import annotations

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.observe import telemetry
from headrace.observe.record import Record
from headrace.protocol.common import Usage
from headrace.protocol.inference import FinalSummary
from services.router.stages import StageLog

_duration = telemetry.histogram(*telemetry.REQUEST_DURATION)
_first_token = telemetry.histogram(*telemetry.TIME_TO_FIRST_TOKEN)
_per_token = telemetry.histogram(*telemetry.TIME_PER_OUTPUT_TOKEN)


class RequestReport:
    """Stages as numbers while the request runs; everything else is made from them once, at the end."""

    def __init__(self, clock: Clock, trace_parent: str, model: str):
        self.stages = StageLog(clock)
        self._record = Record(trace_parent, root="router.generate")
        self._model = model
        self._first_token_s: float | None = None

    @property
    def trace_parent(self) -> str:
        """For the next hop."""
        return self._record.trace_parent

    def stage(self, name: str, start_s: float, tokens: int, end_s: float | None = None, **attributes: object) -> None:
        """A stage of the router's own, in seconds since acceptance. It ends now unless said otherwise."""
        zero, end = self.stages.zero, self.stages.elapsed_s() if end_s is None else end_s
        self.stages.add(name, start_s, end - start_s, tokens)
        self._record.stage(name, zero + start_s, zero + end, tokens=tokens, **attributes)

    def has_tokens(self) -> None:
        """There are tokens; the first time is kept."""
        if self._first_token_s is None:
            self._first_token_s = self.stages.elapsed_s()

    def summary(self, usage: Usage, seed: int) -> FinalSummary:
        """For the final message."""
        stages, tokens = self.stages, usage.generated_tokens
        if self._first_token_s is not None:
            self.stage("router.stream", self._first_token_s, tokens)
        duration_s = stages.elapsed_s()
        stages.add("router.generate", 0.0, duration_s, tokens)
        first_s = self._first_token_s or duration_s
        return FinalSummary(usage, stages.in_order(), seed, self._record.trace_id, first_s, duration_s)

    def close(self, error: HeadraceError | None, request_id: str, usage: Usage, samples: int) -> None:
        """The request has ended: metrics, and the spans when it is traced."""
        self._measure(error, usage.generated_tokens / samples)
        self._record.emit(
            error=error.reason if error is not None else "",
            request_id=request_id,
            tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            attempts=usage.attempts,
        )

    def _measure(self, error: HeadraceError | None, tokens_a_sample: float) -> None:
        duration_s, first_s = self.stages.elapsed_s(), self._first_token_s
        attributes = telemetry.GENAI_ATTRIBUTES | {"gen_ai.request.model": self._model}
        if error is not None:
            _duration.record(duration_s, **attributes, **{"error.type": error.reason})
            return
        _duration.record(duration_s, **attributes)
        if first_s is not None:
            _first_token.record(first_s, **attributes)
        if first_s is not None and tokens_a_sample > 1:
            _per_token.record((duration_s - first_s) / (tokens_a_sample - 1), **attributes)
